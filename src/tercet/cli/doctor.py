"""tercet doctor: what this machine is and what it reaches; writes the machine file that plan and train use."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tercet.planner.table import to_terminal


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet doctor")
    def doctor(
        ranks: Annotated[
            int | None, typer.Option(help="Processes for the collectives: one per card, 3 on a CPU.", min=2)
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Only look, measure nothing, write nothing.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Check drivers, memory, disk and compilers, measure matmuls, copies and collectives, remember the rates."""
        run(ranks, quick, as_json)


def run(ranks: int | None, quick: bool, as_json: bool) -> None:
    import sys

    from tercet.probe.doctor import examine, show

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    report: dict[str, Any] = examine(ranks, quick, say)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        typer.echo(to_terminal(show(report)))
