"""tercet prepare: check, tokenise and pack a recipe's data or a file, and say what was found."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercet.planner.table import to_terminal

if TYPE_CHECKING:
    from tercet.data.prepare import Prepared
    from tercet.spec.recipe import Recipe


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet prepare first-light --show 2")
    def prepare(
        recipe: Annotated[
            str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's file or name, or a file or folder of data.")
        ],
        overrides: Annotated[
            list[str] | None,
            typer.Argument(metavar="[key=value]...", help="Recipe keys, such as data.bad_rows=skip."),
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(metavar="M", help="Whose tokenizer and template read the file: a preset, folder or hub name."),
        ] = None,
        show: Annotated[
            int, typer.Option(metavar="N", min=0, help="Print the first N documents as they will be trained.")
        ] = 0,
        ids: Annotated[bool, typer.Option("--ids", help="With --show: each token with its id.")] = False,
        page: Annotated[
            str | None, typer.Option("--page", metavar="FILE", help="Write the report as an HTML page, rows in colour.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    ) -> None:
        """Check, tokenise and pack data; training then starts at once. Changes nothing else."""
        run(recipe, overrides or [], model, show, ids, page, as_json)


def run(
    name: str,
    overrides: list[str],
    model: str | None = None,
    show: int = 0,
    ids: bool = False,
    page: str | None = None,
    as_json: bool = False,
) -> None:
    from tercet.data.figures import lines
    from tercet.data.prepare import prepare
    from tercet.errors import InputError
    from tercet.spec.families import describe
    from tercet.spec.families.where import tokenizer_place
    from tercet.spec.recipe import with_place

    resolved = _recipe(name, overrides, model)
    # A file read by a tokenizer alone has no model to fit.
    alone = model is None and resolved.name == "data alone" and resolved.data.tokenizer != "train"
    vocabulary = None if alone else describe(resolved.model).vocabulary
    try:
        with _bar() as progress:
            prepared = prepare(
                resolved.data,
                vocabulary=vocabulary,
                model_tokenizer=tokenizer_place(resolved.model.path),
                seed=resolved.train.seed,
                say=_say,
                progress=progress,
            )
    except InputError as error:
        raise with_place(error, name, overrides) from None
    samples = _samples(prepared, max(show, 3 if page else 0), ids)
    if page:
        _write_page(Path(page).expanduser(), name, prepared, samples)
    samples = samples[:show]
    if as_json:
        found = {"key": prepared.key, "hit": prepared.hit, "folder": str(prepared.folder), **prepared.report}
        if show:
            found["samples"] = samples
        # Plain ASCII, so that no console can damage it.
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(to_terminal("\n".join(lines(prepared.report))) + f"\nfolder      {prepared.folder}")
    colour = sys.stdout.isatty()
    for sample in samples:
        typer.echo("\n" + _shown(sample, colour, ids))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _recipe(name: str, overrides: list[str], model: str | None) -> Recipe:
    """Return the recipe that is named, or one around a file of data."""
    from glob import has_magic

    from tercet.errors import InputError, nearest
    from tercet.spec.recipe import build_recipe, load_recipe, shipped_recipes

    path = Path(name).expanduser()
    if (name in shipped_recipes() and not path.is_file()) or path.suffix in (".yaml", ".yml"):
        return load_recipe(name, [*([f"model={model}"] if model else []), *overrides])
    if not (path.exists() or name.startswith(("package:", "hub:")) or has_magic(name)):
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"there is no file, folder or recipe {name!r}{nearest(path.name, [*beside, *shipped_recipes()])}",
            f"Give a file or folder of data, a recipe's YAML file or a shipped one: {', '.join(shipped_recipes())}.",
        )
    tree: dict[str, Any] = {"name": "data alone", "data": {"train": [{"path": name}]}}
    if model is not None:
        tree["model"] = _with_weights(model)
    elif not any(o.startswith("model") for o in overrides):
        if not any(o.startswith("data.tokenizer") for o in overrides) and _holds_chats(path):
            raise InputError(
                f"{name} holds chats: which model's tokenizer and template are to read them?",
                "For example: --model smollm2-135m, or a model's folder or hub name.",
            )
        tree["model"] = "first-light"
    return build_recipe(tree, overrides)


def _with_weights(model: str) -> str:
    """Return where a preset was published, if that lies here: sizes alone have no tokenizer."""
    from tercet.spec.families.where import published

    found = published(model)
    if found is not None:
        _say(f"{model} is read by the tokenizer of {found}")
    return found or model


def _holds_chats(path: Path) -> bool:
    from tercet.data.sources import find
    from tercet.spec.recipe import SourceSection

    if str(path).startswith(("package:", "hub:")):
        return False
    source = find(SourceSection(path=str(path)), "data.train.0")
    for file in source.files[:1]:
        for row in file.read(source.reading(1 << 20)):
            return getattr(row, "chat", False)
    return False


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr for each phase when that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total, phase: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def progress(done: int, total: int, phase: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)

        yield progress


def _samples(prepared: Prepared, count: int, ids: bool) -> list[dict[str, Any]]:
    from tercet.data.show import documents

    return list(documents(prepared, count, ids)) if count else []


def _shown(sample: dict[str, Any], colour: bool, ids: bool) -> str:
    """Return a document as lines: what is trained in colour, or on a plain terminal the rest within [-…-].

    The first token of a document is read but never predicted.
    """
    head = (
        f"== document {sample['number']}: of {sample['path']}, {sample['tokens']} tokens, {sample['trained']} trained"
        f" (sequence {sample['sequence']})"
    )
    out = []
    for piece in sample["pieces"]:
        text = piece["text"]
        if ids:
            text = " ".join(f"{t['id']}:{json.dumps(t['text'], ensure_ascii=False)}" for t in piece["ids"])
        weight = piece["weight"]
        if colour:
            out.append(f"\033[{'32;1' if weight else '2'}m{text}\033[0m")
        else:
            out.append(text if weight else f"[-{text}-]")
        if weight not in (0, 1):
            out.append(f"{{x{weight:g}}}")
    return head + "\n" + "".join(out)


def _write_page(path: Path, name: str, prepared: Prepared, samples: list[dict[str, Any]]) -> None:
    from tercet.data.figures import lines
    from tercet.errors import InputError
    from tercet.report.data_page import data_page

    try:
        path.write_text(data_page(name, lines(prepared.report), prepared.report, samples), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    _say(f"written to {path}")
