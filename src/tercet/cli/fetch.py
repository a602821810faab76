"""tercet fetch: get a model's files, or turn old .bin weights into safetensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from tercet.errors import InputError


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet fetch deepseek-ai/deepseek-llm-7b-base")
    def fetch(
        name: Annotated[
            str,
            typer.Argument(
                metavar="MODEL|FOLDER", help="owner/name, modelscope:owner/name, or a folder of .bin files."
            ),
        ],
        output: Annotated[str | None, typer.Option(help="Folder to write; default: the hub's cache.")] = None,
        revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
        token: Annotated[str | None, typer.Option(help="Access token; default: HF_TOKEN.")] = None,
        only_config: Annotated[bool, typer.Option(help="Config and tokenizer, no weights: enough to plan.")] = False,
        from_bin: Annotated[
            bool,
            typer.Option("--import-bin", help="Read pickled .bin weights safely, write safetensors into --output."),
        ] = False,
    ) -> None:
        """Get a model once; interrupted downloads continue. Mirrors: HF_ENDPOINT."""
        typer.echo(run(name, output, revision, token, only_config, from_bin))


def run(
    name: str, output: str | None, revision: str | None, token: str | None, only_config: bool, from_bin: bool
) -> str:
    """Return the folder. Raises InputError or TercetError with what to do."""
    from tercet.weights.hub import fetch

    target = Path(output).expanduser() if output else None
    if not from_bin:
        if (here := Path(name).expanduser()).is_dir():
            return str(_local(here))
        if name[:1] in (".", "/", "~") or name.removeprefix("modelscope:").count("/") > 1:
            raise InputError(f"there is no folder {name!r} here, and a hub's name is owner/name")
        with _bar() as bar:
            return str(
                fetch(
                    name, output=target, revision=revision, token=token, only_config=only_config, say=_say, progress=bar
                )
            )
    if target is None:
        raise InputError("--import-bin needs --output, the folder to write safetensors into")
    from tercet.weights.pickled import import_bin

    folder = Path(name).expanduser()
    if not folder.is_dir():
        with _bar() as bar:
            folder = fetch(name, revision=revision, token=token, pickled=True, say=_say, progress=bar)
    if folder.resolve() == target.resolve():
        print("writing beside the .bin files; they may be deleted afterwards", file=sys.stderr)
    return str(import_bin(folder, target))


def _local(folder: Path) -> Path:
    """Return a folder that is a model already, saying that nothing was fetched. Raises InputError for another folder."""
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} is a folder on this machine, and holds no config.json",
            "fetch takes a hub name (owner/name). A folder of .bin files: --import-bin --output FOLDER.",
        )
    _say(f"{folder} is a folder on this machine: nothing to fetch")
    return folder


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr when that is a terminal; else None, and lines tell."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
