"""tercet plan: what fits, how fast, how long, how dear, before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def plan(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(metavar="[RECIPE|MODEL] [key=value]...", help="A recipe, preset, model folder or hub name."),
        ] = None,
        gpus: Annotated[str | None, typer.Option(help="Cards, as 3x4090; default: this machine's.")] = None,
        host_ram: Annotated[str | None, typer.Option(help="Host memory, as 128GB; default: this machine's.")] = None,
        links: Annotated[str | None, typer.Option(help="PCIe lanes of each card's slot, as x16,x8,x4.")] = None,
        ranks: Annotated[int | None, typer.Option(help="Use so many cards or CPU processes.", min=1, max=1024)] = None,
        sequence: Annotated[str | None, typer.Option(help="Tokens per sequence, as 2048 or 4k.")] = None,
        batch: Annotated[str | None, typer.Option(help="Sequences per optimizer step, over all ranks.")] = None,
        method: Annotated[str | None, typer.Option(help="full, lora, qlora or pretrain.")] = None,
        price: Annotated[float | None, typer.Option(help="Price of one card for an hour.", min=0)] = None,
        kwh_price: Annotated[float | None, typer.Option(help="Price of a kWh.", min=0)] = None,
        deepspeed_config: Annotated[
            str | None, typer.Option(help="Read a DeepSpeed JSON and say what it means.")
        ] = None,
        accelerate_config: Annotated[
            str | None, typer.Option(help="Read an Accelerate YAML and say what it means.")
        ] = None,
        write: Annotated[
            str | None, typer.Option(help="Write an Accelerate YAML that works, with the meaning of the one read.")
        ] = None,
        rows: Annotated[int, typer.Option(help="Strategies to show.", min=1)] = 6,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Rank the strategies that fit, and say what would make the others fit. Needs neither a GPU nor torch."""
        machine = {
            "gpus": gpus,
            "host_ram": host_ram,
            "links": links,
            "ranks": ranks,
            "sequence": sequence,
            "batch": batch,
            "method": method,
            "price": price,
            "kwh_price": kwh_price,
        }
        run(arguments or [], machine, deepspeed_config, accelerate_config, write, rows, as_json)


def run(
    arguments: list[str],
    machine: dict[str, Any],
    deepspeed_config: str | None,
    accelerate_config: str | None,
    write: str | None,
    rows: int,
    as_json: bool,
) -> None:
    from tercet.errors import InputError

    name = arguments.pop(0) if arguments and "=" not in arguments[0] else None
    if write and not (deepspeed_config or accelerate_config):
        raise InputError("--write needs a file to read", "Add --accelerate-config FILE or --deepspeed-config FILE.")
    if deepspeed_config or accelerate_config:
        from tercet.planner.launcher_files.plan import plan_from_files

        answer = plan_from_files(name, arguments, deepspeed_config, accelerate_config, machine, write)
    else:
        from tercet.planner.answer import plan

        if name is None:
            raise InputError("plan needs a recipe or a model", "For example: tercet plan deepseek-llm-7b --gpus 3x4090")
        answer = plan(name, arguments, **machine)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
    else:
        from tercet.planner.table import show

        typer.echo(show(answer, rows))
    if "model" in answer and not answer["strategies"]:
        raise typer.Exit(3)
