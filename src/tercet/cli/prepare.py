"""tercet prepare: check, tokenise and pack a recipe's data, and say what was found."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tercet.data.prepare import Prepared


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet prepare first-light --show 2")
    def prepare(
        recipe: Annotated[str, typer.Argument(help="A recipe's file or name.")],
        overrides: Annotated[
            list[str] | None,
            typer.Argument(metavar="[key=value]...", help="Recipe keys, such as data.bad_rows=skip."),
        ] = None,
        show: Annotated[
            int, typer.Option(metavar="N", min=0, help="Print the first N sequences as they will be trained.")
        ] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    ) -> None:
        """Check, tokenise and pack a recipe's data; training then starts at once. Changes nothing else."""
        run(recipe, overrides or [], show, as_json)


def run(recipe: str, overrides: list[str], show: int, as_json: bool) -> None:
    from tercet.data.figures import lines
    from tercet.data.prepare import prepare
    from tercet.spec.families import describe
    from tercet.spec.families.where import tokenizer_place
    from tercet.spec.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)
    path = resolved.model.path

    with _bar() as progress:
        prepared = prepare(
            resolved.data,
            vocabulary=describe(resolved.model).vocabulary,
            model_tokenizer=tokenizer_place(path),
            seed=resolved.train.seed,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            progress=progress,
        )
    samples = list(_samples(prepared, show))
    if as_json:
        found = {"key": prepared.key, "hit": prepared.hit, "folder": str(prepared.folder), **prepared.report}
        if show:
            found["samples"] = ["\n".join(s) for s in samples]
        # Plain ASCII, so that no console can damage it.
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo("\n".join([*lines(prepared.report), f"folder      {prepared.folder}"]))
    for sample in samples:
        typer.echo("\n" + "\n".join(sample))


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


def _samples(prepared: Prepared, count: int) -> Iterator[list[str]]:
    """Yield the first sequences in the order of training; [-…-] stands around what no loss is taken of.

    The first token of a document is read but never predicted; every other one is, its end token included.
    """
    if not count:
        return
    from tercet.data.tokenizer import load

    tokenizer = load(prepared.tokenizer_folder / "tokenizer.json")
    for sample in range(count):
        source, row = prepared.train.place(sample)
        ids, lengths = prepared.train.sources[source].row(row)
        name = prepared.report["sources"][source]["path"]
        out = [f"== sample {sample}: sequence {row} of {name}, {len(lengths)} documents, {len(ids)} tokens"]
        at = 0
        for number, length in enumerate(lengths, 1):
            document = ids[at : at + length]
            at += int(length)
            out.append(f"-- document {number}, {length} tokens")
            out.append(f"[-{tokenizer.decode(document[:1])}-]{tokenizer.decode(document[1:])}")
        if padding := prepared.sequence_tokens - len(ids):
            out.append(f"-- [-padding, {padding} tokens-]")
        yield out
