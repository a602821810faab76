"""tercet bench: one recipe on 1 to N cards, measured beside the prediction."""

from __future__ import annotations

from typing import Annotated

import typer

from tercet.errors import InputError
from tercet.training.needs import require_unix


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet bench first-light --ranks 1,3")
    def bench(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(metavar="RECIPE [key=value]...", help="A recipe's file or name, then overrides."),
        ] = None,
        ranks: Annotated[
            str | None, typer.Option(help="Numbers of ranks, as 1,2,3; default: 1 up to the cards, or 1,3 on a CPU.")
        ] = None,
        strategies: Annotated[
            str | None, typer.Option(help="Strategies, as ddp,zero2,zero3; default: the recipe's.")
        ] = None,
        steps: Annotated[int, typer.Option(help="Steps to time.", min=2)] = 20,
        warm_up: Annotated[int, typer.Option(help="Steps to run before.", min=1)] = 5,
        per_rank: Annotated[
            bool, typer.Option("--per-rank", help="Let the effective batch grow with the ranks.")
        ] = False,
        output: Annotated[
            str | None, typer.Option(help="Folder for runs, table and picture; default bench/<recipe>.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    ) -> None:
        """Measure a recipe on 1 to N ranks: tokens/s, memory, efficiency, share of communication."""
        run(arguments or [], ranks, strategies, steps, warm_up, per_rank, output, as_json)


def run(
    arguments: list[str],
    ranks: str | None,
    strategies: str | None,
    steps: int,
    warm_up: int,
    per_rank: bool,
    output: str | None,
    as_json: bool,
) -> None:
    import sys
    from pathlib import Path

    import orjson

    from tercet.report.bench import markdown, picture
    from tercet.spec.recipe import load_recipe

    require_unix()  # before what only Unix has is imported
    from tercet.training.bench import bench

    if not arguments or "=" in arguments[0]:
        raise InputError("bench needs a recipe", "For example: tercet bench first-light --ranks 1,3")
    recipe, *overrides = arguments
    numbers = _numbers(ranks)
    folder = Path(output or f"bench/{load_recipe(recipe, overrides).name}").absolute()
    if (folder / "bench.json").exists():
        raise InputError(f"{folder} holds a bench already", "Give another folder with --output.")
    folder.mkdir(parents=True, exist_ok=True)
    words = [w for w in (strategies or "").split(",") if w]
    report = bench(
        recipe,
        overrides,
        numbers,
        words,
        steps,
        warm_up,
        per_rank,
        folder,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    content = orjson.dumps(report, option=orjson.OPT_INDENT_2)
    (folder / "bench.json").write_bytes(content + b"\n")
    (folder / "bench.md").write_text(markdown(report), encoding="utf-8")
    (folder / "bench.svg").write_text(picture(report), encoding="utf-8")
    typer.echo(content.decode() if as_json else markdown(report))
    if not as_json:
        typer.echo(f"written: {folder}/bench.md, bench.json, bench.svg")
    if not report["rows"]:
        raise typer.Exit(3)


def _numbers(ranks: str | None) -> list[int]:
    """Return the numbers of ranks to bench, ascending: those asked for, or what this machine can start."""
    from tercet.spec.machine import this_machine

    if ranks is None:
        machine = this_machine()
        return list(range(1, machine.ranks + 1)) if machine.card else [1, machine.ranks]
    try:
        numbers = sorted({int(n) for n in ranks.split(",")})
    except ValueError:
        raise InputError(f"--ranks {ranks!r} must be whole numbers, as 1,2,3") from None
    if numbers[0] < 1:
        raise InputError(f"--ranks {ranks!r}: every number must be at least 1")
    return numbers
