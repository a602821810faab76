"""tercet watch: a run's report as a page on this machine that refreshes itself."""

from __future__ import annotations

from typing import Annotated

import typer

from tercet.errors import InputError
from tercet.spec.run_folder import open_run

EXAMPLE = "Example: tercet watch runs/first-light-1"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def watch(
        folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder: running, finished or stopped.")],
        port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 8060,
        every: Annotated[int, typer.Option(help="Seconds between two refreshes.", min=1, max=3600)] = 3,
    ) -> None:
        """Show a run's report while it runs, at an address that only this machine can reach. Ctrl-C ends it."""
        run(folder, port, every)


def run(folder: str, port: int, every: int) -> None:
    import sys

    from tercet.report.watch import server_for

    opened = open_run(folder)
    try:
        server = server_for(opened, port, every, _is_dead)
    except OSError as error:
        raise InputError(f"port {port} cannot be used: {error.strerror}", "Give another with --port.") from None
    typer.echo(f"watching {opened.path} at http://127.0.0.1:{server.server_port}/ (Ctrl-C ends this, not the run)")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _is_dead(lock: object) -> bool:
    """Return whether a run.lock's supervisor has ended without releasing it."""
    from tercet.training.lock import is_alive

    record = lock.get("supervisor") if isinstance(lock, dict) else None
    try:
        return isinstance(record, dict) and is_alive(record) is False
    except (KeyError, TypeError):
        return False
