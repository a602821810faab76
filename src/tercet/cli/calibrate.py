"""tercet calibrate: correct the planner by what this machine's finished runs measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercet.errors import InputError

if TYPE_CHECKING:
    from tercet.planner.constants import Constants


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet calibrate runs/first-light-1")
    def calibrate(
        runs: Annotated[
            list[str] | None, typer.Argument(metavar="RUN...", help="Finished run folders of this machine.")
        ] = None,
        forget: Annotated[bool, typer.Option("--forget", help="Drop what earlier calls found.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Fit the planner's constants to finished runs and write them to the machine file, for plan and train.

        Replaces what earlier calls found: give all runs that should count, as different as possible.
        """
        run(runs or [], forget, as_json)


def run(folders: list[str], forget: bool, as_json: bool) -> None:
    import orjson

    from tercet.planner.calibrate import corrections, of_run
    from tercet.planner.constants import before_runs, load_for
    from tercet.probe.machine_file import update
    from tercet.spec.machine import this_machine

    if bool(folders) == forget:
        raise InputError(
            "give finished run folders, or --forget alone", "For example: tercet calibrate runs/first-light-1"
        )
    if forget:
        path = update({"corrections": {}})
        typer.echo(
            orjson.dumps({"machine_file": str(path), "corrections": {}}).decode() if as_json else f"forgotten: {path}"
        )
        return
    here = this_machine()
    runs = [of_run(folder, here) for folder in folders]
    prior = before_runs(here)
    found = corrections(runs, prior)
    path = update({"corrections": {"kind": here.kind, "runs": len(runs), "constants": found}})
    here = this_machine()
    rows = []
    for row in runs:
        before, after = row.predict(prior), row.predict(load_for(here))
        rows.append(
            {
                "run": row.row.id,
                "tokens_per_second": _three(before.tokens_per_s, after.tokens_per_s, row.row.tokens_per_s),
                "memory_bytes": _three(before.memory_bytes, after.memory_bytes, row.row.memory_bytes),
            }
        )
    if as_json:
        answer = {"runs": rows, "corrections": found, "machine_file": str(path)}
        typer.echo(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        return
    _print(rows, found, prior)
    typer.echo(f"written to {path}; tercet calibrate --forget drops it")


def _three(before: float | None, after: float | None, measured: float | None) -> dict[str, float | None]:
    return {"before": before, "after": after, "measured": measured}


def _print(rows: list[dict[str, Any]], found: dict[str, float], prior: Constants) -> None:
    from dataclasses import fields

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    for key, title, scale in (("tokens_per_second", "tokens/s", 1.0), ("memory_bytes", "GB a rank", 1e9)):
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("run")
        for name in ("predicted before", "after", "measured", "error after"):
            table.add_column(name, justify="right")
        for row in rows:
            figure = row[key]
            cells = [f"{v / scale:.3g}" if scale > 1 and v else f"{v:.0f}" if v else "-" for v in figure.values()]
            known = figure["after"] and figure["measured"]
            table.add_row(row["run"], *cells, f"{figure['after'] / figure['measured'] - 1:+.0%}" if known else "-")
        console.print(table)
        if any(row[key]["before"] is None for row in rows):
            console.print("No speed is predicted here until tercet doctor has measured this machine.", style="yellow")
    what = {f.name: f.metadata["what"] for f in fields(prior)}
    for name, value in found.items():
        console.print(f"{name}: {getattr(prior, name):.4g} -> {value:.4g} ({what[name]})")
    if not found:
        console.print("the shipped constants predict these runs; nothing was corrected")
