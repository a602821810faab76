"""tercet chat: talk to a trained model in the terminal."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tercet.errors import TercetError

COMMANDS = """\
/system TEXT   say what the model is to be; begins the chat again
/clear         begin again, with the same system text
/undo          take the last question and answer back
/again         answer the last question once more
/set KEY=VALUE temperature, top_k, top_p, min_p, repetition_penalty, seed or tokens
/save FILE     write the chat as JSON
/help  /quit   this list; leave (as Ctrl-D)"""


def register(app: typer.Typer) -> None:
    @app.command()
    def chat(
        folder: Annotated[
            str, typer.Argument(metavar="RUN|FOLDER", help="A run folder, a Hugging Face model folder or a .gguf file.")
        ],
        system: Annotated[str | None, typer.Option(help="What the model is to be.")] = None,
        tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 512,
        temperature: Annotated[float | None, typer.Option(help="Default: the model's own, else 0.7.", min=0.0)] = None,
        top_p: Annotated[
            float | None, typer.Option(help="Default: the model's own, else 0.95.", min=0.0, max=1.0)
        ] = None,
        top_k: Annotated[int | None, typer.Option(help="Default: the model's own, else all.", min=0)] = None,
        seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
        quantize: Annotated[
            Literal["int8", "int4"] | None, typer.Option(help="Hold the weights in fewer bits; says what that changes.")
        ] = None,
    ) -> None:
        """Talk to a trained model. A model without a chat template continues what you type.

        Example: tercet chat runs/first-light-1 --system "You answer briefly."
        """
        from tercet.cli import require_models, say_aside

        require_models(folder)
        from tercet.inference.chat import Chat
        from tercet.inference.served import open_served

        served = open_served(folder, None, device, quantize, say_aside)
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        talk = Chat(served, system, tokens, {k: v for k, v in given.items() if v is not None})
        way = "Type and press Enter; /help for commands, Ctrl-D to leave."
        if served.template is None:
            way = "It has no chat template, so it continues what you type. " + way
        typer.echo(f"{served.name}: {way}")
        while (line := _line()) is not None:
            if not _answer_line(talk, line.strip()):
                return


def _line() -> str | None:
    try:
        return input("\n> ")
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _answer_line(talk, line: str) -> bool:
    """Act on what was typed; return whether the chat goes on. Ctrl-C ends an answer, not the chat."""
    if line in ("/quit", "/exit"):
        return False
    if not line:
        return True
    try:
        if line.startswith("/") and not line.startswith("/again"):
            typer.echo(COMMANDS if line == "/help" else talk.command(line))
            return True
        for piece in talk.again() if line.startswith("/again") else talk.ask(line):
            typer.echo(piece, nl=False)
        typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    except TercetError as error:
        typer.echo(f"error: {error}")
    return True
