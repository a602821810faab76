"""tercet plan: what fits, how fast, how long and at what price, before anything runs."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercet.errors import InputError, TercetError
from tercet.planner.table import show
from tercet.units import count_of

if TYPE_CHECKING:
    from tercet.spec.recipe import Recipe

EXAMPLE = "Example: tercet plan deepseek-llm-7b --gpus 3x4090 --host-ram 128GB"
LARGEST_READ_BYTES = 2**30  # of text: to know whether it is prepared, all of it is read
BYTES_PER_TOKEN = 4.0  # of text that nobody has tokenised yet
COUNTED_FORMATS = {"text", "jsonl", "json", "python"}  # whose bytes are text


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def plan(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[RECIPE|MODEL] [key=value]...",
                help="A recipe's file or name, or a model: preset, folder or hub name; then recipe keys.",
            ),
        ] = None,
        gpus: Annotated[
            str | None, typer.Option(help="Cards, as 3x4090 or 2x4090,3060; default: this machine's.")
        ] = None,
        host: Annotated[
            str | None, typer.Option(help='Processor, memory channels, drive: "7950X 2xDDR5-5600 nvme=7GB/s".')
        ] = None,
        host_ram: Annotated[
            str | None,
            typer.Option(
                help="Host memory, as 128GB; default: this machine's; with --gpus it is unknown and not checked."
            ),
        ] = None,
        links: Annotated[str | None, typer.Option(help="PCIe lanes of each card's slot, as x16,x8,x4.")] = None,
        power_limit: Annotated[str | None, typer.Option(help="Power limit of each card, as 300W.")] = None,
        p2p: Annotated[
            bool | None,
            typer.Option("--p2p/--no-p2p", help="Cards reach each other's memory (a driver with peer access)."),
        ] = None,
        disk: Annotated[str | None, typer.Option(help="Free disk for checkpoints and files, as 1TB.")] = None,
        ranks: Annotated[int | None, typer.Option(help="Use so many cards or CPU processes.", min=1, max=1024)] = None,
        sequence: Annotated[str | None, typer.Option(help="Tokens per sequence, as 2048 or 4k.")] = None,
        batch: Annotated[str | None, typer.Option(help="Sequences per optimizer step, over all ranks.")] = None,
        steps: Annotated[int | None, typer.Option(help="Optimizer steps of the run, as train.steps.", min=1)] = None,
        method: Annotated[str | None, typer.Option(help="full, lora, qlora or pretrain.")] = None,
        price: Annotated[float | None, typer.Option(help="Price of one card for an hour.", min=0)] = None,
        kwh_price: Annotated[float | None, typer.Option(help="Price of a kWh.", min=0)] = None,
        margin: Annotated[
            float, typer.Option(help="Share of each card's memory to leave free, as 0.05.", min=0, max=0.5)
        ] = 0.0,
        deepspeed_config: Annotated[
            str | None, typer.Option(help="Read a DeepSpeed JSON and say what it means.")
        ] = None,
        accelerate_config: Annotated[
            str | None, typer.Option(help="Read an Accelerate YAML and say what it means.")
        ] = None,
        write: Annotated[
            str | None, typer.Option(help="Write an Accelerate YAML that works, with the meaning of the one read.")
        ] = None,
        what_if: Annotated[
            str | None,
            typer.Option(help="The best plan for other values of host_ram, cards, links, sequence (commas between)."),
        ] = None,
        output: Annotated[str | None, typer.Option(help="Draw --what-if into this SVG file.")] = None,
        details: Annotated[
            bool, typer.Option("--details", help="Memory row by row, a step's parts, every refusal.")
        ] = False,
        rows: Annotated[int | None, typer.Option(help="Strategies to show: 4, or 6 with --details.", min=1)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Say what fits, how fast it is, and the command that runs it. Needs neither a GPU nor torch."""
        machine = {
            "gpus": gpus,
            "host_ram": host_ram,
            "links": links,
            "host": host,
            "power_limit": power_limit,
            "p2p": p2p,
            "disk": disk,
            "ranks": ranks,
            "sequence": sequence,
            "batch": batch,
            "method": method,
            "price": price,
            "kwh_price": kwh_price,
            "margin": margin,
        }
        if what_if is not None:
            from tercet.planner.what_if import parse_what_if

            machine["what_if"] = parse_what_if(what_if)
        elif output is not None:
            raise InputError("--output draws --what-if", "For example: --what-if host_ram,cards --output plan.svg")
        given = [*(arguments or []), *([f"train.steps={steps}"] if steps is not None else [])]
        run(given, machine, deepspeed_config, accelerate_config, write, rows, details, as_json, output)


def run(
    arguments: list[str],
    machine: dict[str, Any],
    deepspeed_config: str | None,
    accelerate_config: str | None,
    write: str | None,
    rows: int | None,
    details: bool,
    as_json: bool,
    output: str | None = None,
) -> None:
    from tercet.planner.command import train_command

    name = arguments.pop(0) if arguments and "=" not in arguments[0] else None
    if write and not (deepspeed_config or accelerate_config):
        raise InputError("--write needs a file to read", "Add --accelerate-config FILE or --deepspeed-config FILE.")
    overrides, length = arguments, None
    if name is not None:
        overrides, length = with_length(name, arguments)
    if deepspeed_config or accelerate_config:
        from tercet.planner.launcher_files.plan import plan_from_files

        answer = plan_from_files(name, list(overrides), deepspeed_config, accelerate_config, machine, write)
    else:
        from tercet.planner.answer import plan

        if name is None:
            raise InputError("plan needs a recipe or a model", "For example: tercet plan deepseek-llm-7b --gpus 3x4090")
        answer = plan(name, list(overrides), **machine)
    answer["train_refuses"] = refused_by_train(name, list(overrides)) if name is not None else []
    answer["notes"] = [
        *(f"train refuses this as it stands: {why}" for why in answer["train_refuses"]),
        *answer["notes"],
    ]
    if length is not None:
        answer["run"] = length
        answer["assumed"] = [*answer["assumed"], *length["assumed"]]
    if name is not None:
        method = {"lora": ["adapter.kind=lora"], "qlora": ["adapter.kind=lora", "adapter.quantize=nf4"]}
        keys = [*arguments, *method.get(machine["method"] or "", [])]
        answer["train"] = train_command(name, keys, answer)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
    else:
        typer.echo(show(answer, rows, shutil.get_terminal_size().columns, details))
    if output is not None and answer.get("what_if"):
        from tercet.report.what_if import picture

        with open(output, "w", encoding="utf-8") as file:
            file.write(picture(answer))
    if "model" in answer and not answer["strategies"]:
        raise typer.Exit(3)


def with_length(name: str, overrides: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Return the overrides with this run's steps in place of its epochs, and how they are known; None: they are not.

    A bare model has no text, and a recipe with train.steps needs no counting.
    """
    from tercet.planner.answer import is_recipe
    from tercet.spec.recipe import load_recipe

    if not is_recipe(name):
        return overrides, None
    recipe = load_recipe(name, overrides)
    if recipe.train.steps is not None:
        return overrides, {"steps": recipe.train.steps, "says": count_of(recipe.train.steps, "step"), "assumed": []}
    try:
        found = length_of(recipe)
    except (TercetError, OSError):  # no text here yet: planning goes on without it
        return overrides, None
    if found is None:
        return overrides, None
    return [*overrides, f"train.steps={found['steps']}"], found


def refused_by_train(name: str, overrides: list[str]) -> list[str]:
    """Return why `tercet train` would not start with what lies here: data that is missing, a tokenizer without room.

    Planning needs neither, so it goes on; data of the hub is not fetched to find out.
    """
    from tercet.data.hub import PREFIX
    from tercet.planner.answer import is_recipe
    from tercet.spec.recipe import load_recipe, with_place
    from tercet.training.preflight import check_files, check_tokenizer

    if not is_recipe(name):
        return []
    recipe, found = load_recipe(name, overrides), []
    held = recipe.data.validation if isinstance(recipe.data.validation, list) else []
    fetched = any(s.path.startswith(PREFIX) for s in (*recipe.data.train, *held))
    readable = recipe.data.tokenizer == "train" or find_spec("tokenizers") is not None  # planning runs without it
    for check in (*((check_files,) if not fetched else ()), *((check_tokenizer,) if readable else ())):
        try:
            check(recipe)
        except InputError as error:
            found.append(with_place(error, name, overrides).message)
    return found


def length_of(recipe: Recipe) -> dict[str, Any] | None:
    """Return this run's optimizer steps: counted when its data is prepared, else estimated from the files' bytes."""
    from math import ceil

    from tercet.data.prepare import find_prepared, source_bytes
    from tercet.spec.families import describe
    from tercet.spec.families.where import tokenizer_place

    formats = source_bytes(recipe.data)
    size, epochs = sum(formats.values()), recipe.train.epochs or 1.0
    prepared = None
    if size <= LARGEST_READ_BYTES:
        prepared = find_prepared(
            recipe.data,
            vocabulary=describe(recipe.model).vocabulary,
            model_tokenizer=tokenizer_place(recipe.model.path),
            seed=recipe.train.seed,
        )
    about, assumed = "", []
    if prepared is not None:
        rows = float(prepared.train.rows_per_epoch)
    elif formats.keys() <= COUNTED_FORMATS:
        rows, about = size / BYTES_PER_TOKEN / recipe.data.sequence_tokens, "about "
        assumed = [f"{size:,} bytes of text at {BYTES_PER_TOKEN:g} bytes a token (tercet prepare counts them)"]
    else:
        return None
    steps = max(1, ceil(epochs * rows / recipe.train.batch_sequences))
    says = f"{count_of(epochs, 'epoch')}, {about}{count_of(steps, 'step')}"
    return {"steps": steps, "says": says, "assumed": assumed}
