"""tercet train: one command from text to a trained model."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def train(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(metavar="RECIPE [key=value]...", help="A recipe's file or name, then overrides."),
        ] = None,
        ranks: Annotated[
            int | None, typer.Option(help="Processes: one per card, or as many as you like on a CPU.", min=1)
        ] = None,
        output: Annotated[str | None, typer.Option(help="The run folder; default runs/<recipe>-<n>.")] = None,
        resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
        restarts: Annotated[int, typer.Option(help="How often to resume by itself after a failure.", min=0)] = 0,
        print_recipe: Annotated[bool, typer.Option(help="Print the resolved recipe and leave.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON at the end.")] = False,
    ) -> None:
        """Train a recipe: text in, trained model out. Predicts first, refuses what cannot work."""
        run(arguments or [], ranks, output, resume, restarts, print_recipe, as_json)


def run(
    arguments: list[str],
    ranks: int | None,
    output: str | None,
    resume: str | None,
    restarts: int,
    print_recipe: bool,
    as_json: bool,
) -> None:
    from tercet.errors import InputError
    from tercet.spec.recipe import load_recipe
    from tercet.training import supervise

    recipe = None
    if resume is None:
        if not arguments or "=" in arguments[0]:
            raise InputError("train needs a recipe", "For example: tercet train first-light; or --resume RUN.")
        recipe, *arguments = arguments
    if print_recipe:
        from tercet.spec.run_folder import open_run

        typer.echo(load_recipe(recipe or open_run(resume or "").recipe, arguments).to_yaml(), nl=False)
        return
    if os.environ.get("RANK") is not None:
        from tercet.training.launched import run_launched

        code = run_launched(recipe, arguments, output, resume)
        sys.stdout.flush()
        os._exit(code)  # not sys.exit: after a broken collective, library threads may never join

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if resume is not None:
        folder = supervise.resume(resume, arguments, ranks=ranks, restarts=restarts, say=say)
    else:
        folder = supervise.train(recipe or "", arguments, ranks=ranks, output=output, restarts=restarts, say=say)
    _show_end(str(folder), as_json)


def _show_end(folder: str, as_json: bool) -> None:
    from tercet.report.compare import compare
    from tercet.spec.run_folder import open_run
    from tercet.units import show_bytes, show_count, show_seconds

    run = open_run(folder)
    summary = run.read_summary() or {}
    compared = compare(run.read_plan() or {}, summary)
    if as_json:
        import orjson

        typer.echo(orjson.dumps({"run": folder, **summary, "compared": compared}, option=orjson.OPT_INDENT_2).decode())
        return
    loss = summary.get("validation_loss")
    typer.echo(
        f"{summary['steps']} steps, {show_count(summary['tokens'])} tokens in {show_seconds(summary['seconds'])}; "
        f"train loss {summary['train_loss']:.4f}"
        + (f", validation loss {loss:.4f}" if loss is not None else "")
        + f"; {show_count(summary['tokens_per_second'] or 0)} tokens/s; "
        f"peak {show_bytes(max(summary['peak_bytes_per_rank']))} on a rank"
    )
    typer.echo("predicted beside measured:")
    for row in compared:
        if row["group"] == "between steps" or row["measured"] is None:
            continue  # the whole table: tercet report
        show = show_bytes if row["unit"] == "bytes" else show_seconds if row["unit"] == "s" else show_count
        predicted = "unknown" if row["predicted"] is None else show(row["predicted"])
        error = "" if row["error"] is None else f"  ({row['error']:+.1%})" if row["error"] else "  (exact)"
        typer.echo(f"  {row['what']:22} {predicted:>10}  {show(row['measured']):>10}{error}")
    for name, path in (
        ("model", run.model),
        ("checkpoints", run.checkpoints),
        ("report", run.report),
        ("tensorboard", run.tensorboard),
        ("logs", run.logs),
    ):
        typer.echo(f"{name:12} {path}")
