"""tercet report: a run folder as one page, and its main figures on the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tercet.errors import InputError, file_error
from tercet.spec.run_folder import open_run

if TYPE_CHECKING:
    from tercet.report.story import Story


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet report runs/first-light-1")
    def report(
        folders: Annotated[
            list[str], typer.Argument(metavar="RUN...", help="A run folder, finished or not; several are compared.")
        ],
        output: Annotated[
            str | None, typer.Option(metavar="FILE", help="Where the page goes; default RUN/report.html.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Write RUN/report.html and print the main figures, predicted beside measured; compare several runs."""
        if len(folders) > 1:
            run_several(folders, output, as_json)
        else:
            run(folders[0], output, as_json)


def run_several(folders: list[str], output: str | None, as_json: bool) -> None:
    import shutil

    from tercet.report.several import beside, show
    from tercet.report.story import read_story

    if output is not None:
        raise InputError("--output is for one run's page", "Compared runs are printed; --json prints them as data.")
    found = beside([read_story(open_run(folder)) for folder in folders])
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    else:
        typer.echo(show(found, shutil.get_terminal_size().columns))


def run(folder: str, output: str | None, as_json: bool) -> None:
    from tercet.report.page import write_report
    from tercet.report.show import to_json
    from tercet.report.story import read_story

    opened = open_run(folder)
    target = opened.report if output is None else Path(output).expanduser()
    page: Path | None = target
    try:
        write_report(opened, target)
    except OSError as error:  # somebody else's run: its figures can still be told
        if output is not None:
            raise
        page = None
        print(
            f"{file_error(error) or error}\nThe page elsewhere: tercet report {folder} --output FILE", file=sys.stderr
        )
    story = read_story(opened)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(to_json(story, page), option=orjson.OPT_INDENT_2))  # bytes: UTF-8 in any locale
        return
    _print(story)
    if page is not None:
        typer.echo(f"report {page}")


def _print(story: Story) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tercet.report.show import comparison_groups, comparison_note, lead_of, notes_of, show_loss, state_of, tiles_of
    from tercet.report.sources import source_rows
    from tercet.units import show_count

    console = Console(highlight=False, emoji=False)
    console.print(Text(f"{story.recipe.get('name', 'run')} · {state_of(story)['word']}", style="bold"))
    console.print(Text(lead_of(story)))
    for note in notes_of(story):
        console.print(Text(note["text"], style="red" if note["style"] == "bad" else "yellow"))
    figures = Table(box=None, show_header=False, pad_edge=False)
    for tile in tiles_of(story):
        figures.add_row(tile["name"], Text(tile["value"], style="bold"), Text(tile["small"], style="dim"))
    console.print(figures)
    if sources := source_rows(story.sources, story.steps):
        table = Table(title="Loss per source", title_justify="left", title_style="bold")
        table.add_column("source")
        for name in ("trained tokens", "share", "at first", "at last"):
            table.add_column(name, justify="right")
        for row in sources:
            share, losses = f"{100 * row['share']:.1f} %", (show_loss(row["first"]), show_loss(row["last"]))
            table.add_row(Text(row["name"]), show_count(row["weight"]), share, *losses)
        console.print(table)
    groups = comparison_groups(story.compared)
    colors = {"close": "green", "near": "yellow", "far": "red"}
    for group in groups:
        table = Table(title=group["title"], title_justify="left", title_style="bold")
        table.add_column(group["head"])
        for name in ("predicted", "measured", "error"):
            table.add_column(name, justify="right")
        for row in group["rows"]:
            error = Text(row["error"], style=colors.get(row["grade"], ""))
            table.add_row(Text(row["what"]), row["predicted"], row["measured"], error)
        console.print(table)
    if groups:
        console.print(Text(comparison_note(story.compared, bars=False), style="dim"))
