"""tercet evaluate: how well models predict texts, in one table; or lm-eval's tasks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercet.errors import InputError, nearest

if TYPE_CHECKING:
    from tercet.data.prepare import Prepared
    from tercet.data.shards import Rows
    from tercet.spec.recipe import DataSection

LONGEST = 2048  # tokens that a model looks back over, unless it or --sequence says otherwise
# Of data, and of its sources: how texts are read.
KEYS = ("template", "train_on", "bad_rows", "long_rows", "cache")
SOURCE_KEYS = ("map", "format")
KEY = re.compile(r"\w+(\.\w+)*=")
SOURCE_KEY = re.compile(r"data\.train\.\d+\.(\w+)")


def register(app: typer.Typer) -> None:
    @app.command()
    def evaluate(
        models: Annotated[
            list[str],
            typer.Argument(
                metavar="RUN|FOLDER|GGUF... [key=value]...",
                help="A model, and more to compare with it; recipe keys for --data, such as data.template=plain.",
            ),
        ],
        data: Annotated[
            list[str] | None,
            typer.Option(
                help="Text to predict: a file, folder or glob; may be repeated. Default: the run's validation data."
            ),
        ] = None,
        tasks: Annotated[
            str | None, typer.Option(help="Instead: tasks of lm-eval, by name or as .yaml files, separated by commas.")
        ] = None,
        limit: Annotated[int | None, typer.Option(help="With --tasks: so many questions of each.", min=1)] = None,
        sequence: Annotated[
            int | None,
            typer.Option(help="With --data: tokens a text is split at; default: the run's, else 2048.", min=2),
        ] = None,
        batch: Annotated[int, typer.Option(help="Sequences computed at once.", min=1)] = 8,
        ranks: Annotated[
            int | None, typer.Option(help="Processes that share the rows; default: one per card, or one.", min=1)
        ] = None,
        dtype: Annotated[
            str | None, typer.Option(help="fp32, bf16, fp16 or fp64; default: fp32 on a CPU, on a card as trained.")
        ] = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    ) -> None:
        """Say how well models predict texts: loss, perplexity, bits per byte. The figures do not depend on --batch or --ranks.

        Example: tercet evaluate runs/first-light-1 --data book.txt
        """
        from tercet.cli import require_models

        models, keys = _keys_apart(models)
        require_models(*models)
        if keys and not data:
            raise InputError(f"{keys[0]!r} says how --data is read, and there is no --data", "Add --data FILE.")
        section = _section(data, keys) if data else None
        if tasks is not None:
            found = _tasks(models, tasks, limit, batch, dtype, device)
            show = _show_tasks
        else:
            found = _texts(models, section, sequence, batch, ranks, dtype, device)
            show = _show
        if as_json:
            import orjson

            typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        else:
            show(found)


def _keys_apart(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (models, recipe keys). Raises InputError for a key that cannot act here."""
    from pathlib import Path

    keys = [w for w in words if KEY.match(w) and not Path(w).expanduser().exists()]
    for word in keys:
        name = word.partition("=")[0]
        of_source = SOURCE_KEY.match(name)
        if not (of_source and of_source[1] in SOURCE_KEYS) and name.removeprefix("data.") not in KEYS:
            known = [f"data.{key}" for key in KEYS] + [f"data.train.0.{key}" for key in SOURCE_KEYS]
            raise InputError(f"{name} has no part in evaluating{nearest(name, known)}", f"Keys: {', '.join(known)}.")
    models = [w for w in words if w not in keys]
    if not models:
        raise InputError("evaluate needs a model", "For example: tercet evaluate RUN --data book.txt")
    return models, keys


def _section(data: list[str], keys: list[str]) -> DataSection:
    """Return the data section of the texts with its keys. Raises InputError for one that is not there, or a bad value."""
    from tercet.data.sources import find
    from tercet.spec.recipe import build_recipe

    tree = {"train": [{"path": text} for text in data], "tokenizer": "model", "long_rows": "split"}
    section = build_recipe({"name": "evaluate", "model": "first-light", "data": tree}, keys).data
    for source in section.train:
        find(source, "--data")
    return section


def _texts(
    models: list[str],
    data: DataSection | None,
    sequence: int | None,
    batch: int,
    ranks: int | None,
    dtype: str | None,
    device: str,
) -> dict[str, Any]:
    import time

    from tercet.inference.device import choose_device
    from tercet.inference.evaluate import Work, name_of
    from tercet.inference.evaluate_ranks import evaluate
    from tercet.weights.reading import DTYPES, model_place

    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    for model in models:  # before anything is computed
        model_place(model)
    ranks = ranks or _cards(choose_device(device))
    rows = _prepare(models, data, sequence)
    results = []
    for model, (found, pad_id) in zip(models, rows, strict=True):
        work = Work(model, found, pad_id, batch, dtype, device)
        begin = time.monotonic()
        with _bar(f"evaluate {name_of(model)}", work.count) as progress:
            figures = evaluate(work, ranks, progress).figures()
        if not figures["tokens"]:
            raise InputError(f"{model}: no token of this text is predicted: every text has one token alone")
        results.append({"model": model, **figures, "ranks": ranks, "seconds": round(time.monotonic() - begin, 3)})
    texts = f"validation data of {_run_among(models)}" if data is None else [source.path for source in data.train]
    return {"data": texts, "models": results}


def _cards(device: Any) -> int:
    import torch

    return torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1


def _prepare(models: list[str], data: DataSection | None, sequence: int | None) -> list[tuple[tuple[Rows, ...], int]]:
    """Return each model's rows and padding id: the same text, in the tokens of each model's own tokenizer."""
    run = _run_among(models)
    if data is None:
        return [_validation(model, run) for model in models]
    from tercet.spec.families import describe
    from tercet.spec.recipe import ModelSection
    from tercet.weights.reading import model_place

    places = [model_place(model) for model in models]
    specs = [describe(ModelSection(path=str(place))) for place in places]
    if sequence is None:  # one length for all, so that every model looks back as far
        own = _recipe(run).data.sequence_tokens if run is not None else LONGEST
        sequence = min(own, *(spec.context_tokens for spec in specs))
    data = data.model_copy(update={"sequence_tokens": sequence})
    found = []
    for model, place, spec in zip(models, places, specs, strict=True):
        made = _prepared(model, None, data, spec.vocabulary, model_tokenizer=place, seed=0)
        found.append((made.train.sources, made.pad_id))
    return found


def _prepared(model: str, run: str | None, data: DataSection, vocabulary: int, **more: Any) -> Prepared:
    """Return the data, those of `run` if one is given, in the tokens of `model`. Raises InputError that names both."""
    from tercet.cli import say_aside
    from tercet.data.prepare import prepare
    from tercet.inference.served import of_model

    try:
        with _bar("prepare", None) as progress:
            # The embedding is compared below: the recipe's way out, another model.vocabulary, does not exist here.
            needed = vocabulary if data.tokenizer == "train" else None
            made = prepare(data, vocabulary=needed, say=say_aside, progress=progress, **more)
    except InputError as error:
        told = of_model(error)
        if run is None:
            raise InputError(f"for {model}: {told.message}", told.hint) from None
        text = f"the validation data of {run} for {model}: {told.message}"
        raise InputError(text, "Another text: --data FILE.") from None
    if made.vocabulary > vocabulary:
        raise InputError(
            f"{model}: its tokenizer has {made.vocabulary} ids, but its embedding {vocabulary} rows",
            "Give the model the tokenizer that it was trained with.",
        )
    return made


def _validation(model: str, run: str | None) -> tuple[tuple[Rows, ...], int]:
    """Return the validation rows of `run` in the tokens of `model`: for the run itself those that it was trained beside."""
    from pathlib import Path

    from tercet.data.kept import read_kept
    from tercet.spec.families import describe
    from tercet.spec.families.where import tokenizer_place
    from tercet.spec.recipe import ModelSection
    from tercet.weights.reading import model_place

    if run is None:
        raise InputError(f"{model} is no run, which would bring validation data", "Say what to predict: --data FILE.")
    recipe = _recipe(run)
    if recipe.data.validation is None:
        raise InputError(f"{run} was trained without validation data", "Say what to predict: --data FILE.")
    place = model_place(model)
    own = Path(model).expanduser() == Path(run).expanduser()
    data = recipe.data if own else recipe.data.model_copy(update={"tokenizer": "model"})
    made = _prepared(
        model,
        run,
        data,
        describe(ModelSection(path=str(place))).vocabulary,
        model_tokenizer=tokenizer_place(recipe.model.path) if own else place,
        seed=recipe.train.seed,
        kept=read_kept(Path(run).expanduser(), False) if own else None,
    )
    assert made.validation is not None
    return (made.validation,), made.pad_id


def _run_among(models: list[str]) -> str | None:
    from pathlib import Path

    return next((m for m in models if (Path(m).expanduser() / "recipe.yaml").is_file()), None)


def _recipe(run: str) -> Any:
    from tercet.spec.recipe import load_run_recipe
    from tercet.spec.run_folder import open_run

    return load_run_recipe(open_run(run).recipe)


def _bar(what: str, count: int | None) -> Any:
    """Return a context whose value takes progress: rows done, or (done, total, phase) of a preparation."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(what, total=count)

            def add(done: int, total: int | None = None, phase: str = what) -> None:
                if total is None:
                    bar.update(task, advance=done)
                else:
                    bar.update(task, completed=done, total=total, description=phase)

            yield add

    return shown()


def _show(found: dict[str, Any]) -> None:
    """Print the table; bits per byte compare models whatever their tokenizers are."""
    from tercet.units import show_bytes, show_count, show_seconds

    rows, first = found["models"], found["models"][0]["bits_per_byte"]
    width = max(len("model"), *(len(row["model"]) for row in rows))
    text = found["data"] if isinstance(found["data"], str) else ", ".join(found["data"])
    typer.echo(f"{text}")
    typer.echo(
        f"{'model':{width}}  {'loss':>8}  {'perplexity':>10}  {'bits/byte':>9}  {'':>7}  {'tokens':>8}  {'text':>9}  time"
    )
    for row in rows:
        bits = row["bits_per_byte"]
        change = f"{bits / first - 1:+.1%}" if bits and first and row is not rows[0] else ""
        typer.echo(
            f"{row['model']:{width}}  {row['loss']:8.4f}  {row['perplexity']:10.4g}  "
            f"{'unknown' if bits is None else format(bits, '.4f'):>9}  {change:>7}  {show_count(row['tokens']):>8}  "
            f"{'' if row['bytes'] is None else show_bytes(row['bytes']):>9}  "
            f"{show_seconds(row['seconds'])} ({row['dtype']}, {row['device']})"
        )


# ---------------------------------------------------------------------------------------------------- lm-eval


def _tasks(
    models: list[str], tasks: str, limit: int | None, batch: int, dtype: str | None, device: str
) -> dict[str, Any]:
    from tercet.inference.harness import evaluate_tasks, find_tasks
    from tercet.inference.served import open_served

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    known = find_tasks(names)
    return {
        "tasks": names,
        "models": [
            {"model": model, "tasks": evaluate_tasks(open_served(model, dtype, device), known, batch, limit)}
            for model in models
        ],
    }


def _show_tasks(found: dict[str, Any]) -> None:
    rows = [
        (task, metric, [m["tasks"].get(task, {}).get(metric) for m in found["models"]])
        for task, metrics in found["models"][0]["tasks"].items()
        for metric in metrics
        if not metric.endswith("_stderr")
    ]
    wide = [max(10, len(m["model"])) for m in found["models"]]
    first, second = (max(8, *(len(row[n]) for row in rows)) for n in (0, 1))
    heads = "  ".join(f"{m['model']:>{w}}" for m, w in zip(found["models"], wide, strict=True))
    typer.echo(f"{'task':{first}}  {'measure':{second}}  {heads}")
    for task, metric, values in rows:
        shown = "  ".join(
            f"{v:>{w}.4f}" if isinstance(v, float | int) else f"{v if v is not None else '-'!s:>{w}}"
            for v, w in zip(values, wide, strict=True)
        )
        typer.echo(f"{task:{first}}  {metric:{second}}  {shown}")
