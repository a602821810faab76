"""The command line: one file per command. Here only Typer and the printing of errors."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tercet.errors import InputError, InterruptedRun, TercetError, disk_full, file_error

# Help is as wide as the terminal; what is printed to a file or a pipe has 80 columns.
CONTEXT = {"max_content_width": 160, "help_option_names": ["-h", "--help"]}
COMMANDS = tuple(module.name for module in pkgutil.iter_modules(__path__))


class Commands(TyperGroup):
    """The commands, each loaded when it is asked for: one that answers in half a second imports no other."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]  # list is a command here: its module stands in this name once it is loaded

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
            importlib.import_module(f"{__name__}.{cmd_name}").register(alone)
            found = typer.main.get_command(alone)
            # Given whole, it is wrapped in the list of commands and not cut.
            found.short_help = (found.help or "").strip().partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."
            self.commands[cmd_name] = found
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:  # whose nearest name is looked for among those that are loaded
            for name in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tercet",
    cls=Commands,
    help="Train DeepSeek-style language models on a few graphics cards; know beforehand what fits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
    epilog="Example: tercet plan deepseek-llm-7b --gpus 3x4090; then tercet train first-light",
)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    # DeepSpeed's launcher puts this before everything else; the environment says the same.
    local_rank: int = typer.Option(0, "--local_rank", "--local-rank", hidden=True),
) -> None:
    if version:
        from tercet import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every error is one message on stderr and an exit code, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # A console that lacks a character shows a mark instead of ending the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except TercetError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (told := _not_installed(error)) is None:
            _unexpected(error)
            sys.exit(1)
        show_error(told)
        sys.exit(told.exit_code)
    except Exception as error:
        # What the file system refuses is no fault of ours; libraries wrap a full disk in errors of their own.
        told = (file_error(error) if isinstance(error, OSError) else None) or disk_full(error)
        if told is None:
            _unexpected(error)
            sys.exit(1)
        show_error(told)
        sys.exit(told.exit_code)
    finally:
        _let_go_of_consoles()


def _let_go_of_consoles() -> None:
    """Flush what is printed. Python flushes once more at its end and, where a console is gone, would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _not_installed(error: ModuleNotFoundError) -> TercetError | None:
    """Return what to install when a package of an extra is missing; None for any other module."""
    from importlib.metadata import requires
    from re import match

    wanted = (error.name or "").partition(".")[0]
    lines = (match(r"([\w-]+).*extra == \W(\w+)", line) for line in requires("tercet") or ())
    extras = {"google": "train", "tensorboard": "train"}
    for found in lines:
        if found and found[2] != "dev":
            extras.setdefault(found[1].replace("-", "_"), found[2])
    if wanted not in extras:
        return None
    return InputError(
        f"this needs the package {wanted}, which is not installed", f"pip install 'tercet[{extras[wanted]}]'"
    )


def require_models(*names: str) -> None:
    """Raise InputError for a model that is neither here nor a hub's name: before torch is loaded, which takes seconds."""
    from tercet.spec.families.where import locate

    for name in names:
        locate(name)


def say_aside(text: str) -> None:
    """Print what is said beside the result, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show_error(error: TercetError) -> None:
    """Print an error; a console that is gone does not change the exit code."""
    kind = "" if isinstance(error, InterruptedRun) else "error: "
    with contextlib.suppress(OSError):
        print(f"{kind}{error}", file=sys.stderr, flush=True)


def _unexpected(error: Exception) -> None:
    """A fault of ours: say so in one line and keep the traceback in a file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="tercet-error-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    print(
        f"error: {type(error).__name__}: {error}\n"
        f"This is a fault of Tercet, not of your input. The details are in {file.name}.",
        file=sys.stderr,
    )
