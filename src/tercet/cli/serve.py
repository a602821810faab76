"""tercet serve: a model behind OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tercet.errors import InputError


def register(app: typer.Typer) -> None:
    @app.command()
    def serve(
        folder: Annotated[
            str, typer.Argument(metavar="RUN|FOLDER", help="A run folder, a Hugging Face model folder or a .gguf file.")
        ],
        host: Annotated[str, typer.Option(help="Address to listen at; default: this machine alone.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
        api_key: Annotated[
            str | None, typer.Option(envvar="TERCET_API_KEY", help="Clients must send it; needed beyond this machine.")
        ] = None,
        rows: Annotated[int, typer.Option(help="Answers computed side by side.", min=1, max=256)] = 8,
        queue: Annotated[int, typer.Option(help="Requests that may wait.", min=1)] = 64,
        context: Annotated[
            int | None, typer.Option(help="Tokens of a prompt and its answer; default: the model's.", min=2)
        ] = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
        quantize: Annotated[
            Literal["int8", "int4"] | None, typer.Option(help="Hold the weights in fewer bits; says what that changes.")
        ] = None,
    ) -> None:
        """Serve a model to any program that speaks OpenAI's protocol, and a page to chat at /.

        Example: tercet serve runs/first-light-1 --port 8000
        """
        import socket

        from tercet.cli import require_models, say_aside

        require_models(folder)
        import uvicorn

        from tercet.inference.engine import Engine
        from tercet.inference.serve import LOOPBACK, Server
        from tercet.inference.served import open_served

        here = host in LOOPBACK
        if not here and not api_key:
            raise InputError(
                f"--host {host} lets other machines in, and no --api-key is set",
                "Set --api-key (or TERCET_API_KEY), or keep --host 127.0.0.1.",
            )
        door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # before the weights are loaded
            door.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(f"{host}:{port} cannot be listened at: {error}", "Choose another --port.") from None
        say_aside(f"loading {folder}")
        served = open_served(folder, None, device, quantize, say_aside)
        with Engine(served, rows, queue, context) as engine:
            server = Server(engine, api_key, LOOPBACK if here else None)
            typer.echo(f"{served.name} at http://{host}:{door.getsockname()[1]} (Ctrl-C ends)")
            uvicorn.Server(uvicorn.Config(server.app, log_level="warning")).run(sockets=[door])
