"""tercet train: one command from text to a trained model."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tercet.errors import InputError, TercetError
from tercet.report.compare import compare
from tercet.spec.run_folder import open_run
from tercet.training.needs import require_unix
from tercet.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from tercet.training.session import Asked


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet train first-light train.steps=20 strategy=zero3 --ranks 3")
    def train(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(metavar="RECIPE [key=value]...", help="A recipe's file or name, then overrides."),
        ] = None,
        ranks: Annotated[
            int | None, typer.Option(help="Processes: one per card, or as many as you like on a CPU.", min=1)
        ] = None,
        gpus: Annotated[int | None, typer.Option(help="So many of this machine's cards; default: all.", min=1)] = None,
        steps: Annotated[int | None, typer.Option(help="Optimizer steps of the run, as train.steps.", min=1)] = None,
        output: Annotated[str | None, typer.Option(help="The run folder; default runs/<recipe>-<n>.")] = None,
        resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
        restarts: Annotated[int, typer.Option(help="How often to resume by itself after a failure.", min=0)] = 0,
        accept_changed_data: Annotated[
            bool, typer.Option(help="With --resume: train on, although the data is not what the run began with.")
        ] = False,
        cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, although there are cards.")] = False,
        print_recipe: Annotated[bool, typer.Option(help="Print the resolved recipe and leave.")] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the summary at the end, or the resolved recipe, as JSON.")
        ] = False,
    ) -> None:
        """Train a recipe: text in, trained model out. Predicts first, refuses what cannot work."""
        if cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # here and in the ranks: as if there were no card
        given = [*(arguments or []), *([f"train.steps={steps}"] if steps is not None else [])]
        if gpus is not None:
            ranks = cards_asked_for(gpus, ranks)
        run(given, ranks, output, resume, restarts, accept_changed_data, print_recipe, as_json)


def cards_asked_for(gpus: int, ranks: int | None) -> int:
    """Return the ranks, one per card. Raises InputError where there are not so many cards, or --ranks says otherwise."""
    from tercet.spec.cards import detect_gpus

    if ranks not in (None, gpus):
        raise InputError(f"--gpus {gpus} and --ranks {ranks}: each card takes one rank", "Leave one of them out.")
    there = len(detect_gpus())
    if gpus > there:
        raise InputError(
            f"--gpus {gpus}, but {f'only {there}' if there else 'no'} cards can be used here",
            "tercet plan describes other machines; --ranks starts processes on the CPU." if not there else None,
        )
    return gpus


def run(
    arguments: list[str],
    ranks: int | None,
    output: str | None,
    resume: str | None,
    restarts: int,
    accept_changed_data: bool,
    print_recipe: bool,
    as_json: bool,
) -> None:
    from tercet.spec.recipe import load_recipe, load_run_recipe, with_place

    require_unix()  # before what only Unix has is imported
    from tercet.training.console import ConsoleFile
    from tercet.training.session import Asked
    from tercet.training.supervise import run_session

    recipe = None
    if resume is None:
        if not arguments or "=" in arguments[0]:
            raise InputError("train needs a recipe", "For example: tercet train first-light; or --resume RUN.")
        recipe, *arguments = arguments
    if print_recipe:
        found = load_run_recipe(open_run(resume).recipe, arguments) if resume else load_recipe(recipe or "", arguments)
        typer.echo(found.model_dump_json(indent=2) if as_json else found.to_yaml().rstrip())
        return
    asked = Asked(recipe, arguments, output, resume, ranks, restarts, accept_changed_data)
    if os.environ.get("RANK") is not None:
        _run_launched(asked, as_json)
    console = ConsoleFile(2, getattr(sys.stderr, "encoding", None))
    try:
        folder = run_session(asked, console.say)
    except InputError as error:
        raise with_place(error, recipe, arguments) if recipe else error from None
    finally:
        console.drain()
    _show_end(str(folder), as_json)


def _run_launched(asked: Asked, as_json: bool) -> NoReturn:
    from tercet.cli import show_error
    from tercet.spec.recipe import with_place
    from tercet.training.launched import run_launched

    try:
        ended = run_launched(asked)
        code = ended.code
        if ended.run is not None:
            _show_end(str(ended.run), as_json)
    except TercetError as error:
        if isinstance(error, InputError) and asked.recipe:
            error = with_place(error, asked.recipe, asked.overrides)
        show_error(error)
        code = error.exit_code
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # not sys.exit: after a broken collective, library threads may never join


def _show_end(folder: str, as_json: bool) -> None:
    """Show the finished run; a reader that has gone (`| head`) does not make it a failed one."""
    try:
        _print_end(folder, as_json)
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # what is left in the buffer goes nowhere, not into an error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print_end(folder: str, as_json: bool) -> None:
    run = open_run(folder)
    summary = run.read_summary() or {}
    compared = compare(run.read_plan() or {}, summary)
    if as_json:
        import orjson

        typer.echo(orjson.dumps({"run": folder, **summary, "compared": compared}, option=orjson.OPT_INDENT_2).decode())
        return
    trained, loss = summary["train_loss"], summary.get("validation_loss")
    typer.echo(
        f"{summary['steps']} steps, {show_count(summary['tokens'])} tokens in {show_seconds(summary['seconds'])}; "
        + (f"train loss {trained:.4f}" if trained is not None else "no train loss: every step was skipped")
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
        *([("adapter", run.adapter)] if run.adapter.is_dir() else [("model", run.model)]),
        ("checkpoints", run.checkpoints),
        ("report", run.report),
        ("tensorboard", run.tensorboard),
        ("logs", run.logs),
    ):
        typer.echo(f"{name:12} {path}")
    typer.echo(f"Talk to it: tercet chat {shlex.quote(str(folder))}")
