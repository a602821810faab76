"""The report of a run that goes on, served on loopback: made anew for every request, refreshed by the browser.

The page needs no script to refresh itself, so it works wherever report.html does.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jinja2 import Environment

from tercet.errors import TercetError
from tercet.report.page import render
from tercet.report.story import Story, read_story
from tercet.spec.run_folder import RunFolder, read_json

LOOPBACK = "127.0.0.1"
OURS = {LOOPBACK, "localhost"}  # another Host header is another site's name pointed at this machine
DEAD = "The process that ran this has ended without saying so (run.lock is stale): tercet train --resume goes on."
WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{{ every }}">
<title>Waiting · Tercet</title><body><p>{{ why }}</p><p>Asked again every {{ every }} s.</p></body></html>"""


def server_for(run: RunFolder, port: int, every: int, is_dead: Callable[[Any], bool]) -> ThreadingHTTPServer:
    """Return a server, not yet serving. `is_dead` judges run.lock's content. Raises OSError for a port in use."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if host not in OURS:
                self.send_error(403, "only for this machine")
            elif self.path not in ("/", "/index.html"):
                self.send_error(404)
            else:
                self._answer(page(run, every, is_dead))

        def _answer(self, text: str) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: a line every few seconds would hide the address."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)


def page(run: RunFolder, every: int, is_dead: Callable[[Any], bool]) -> str:
    """Return the page as it stands: refreshing while the run may go on, with what is wrong when it cannot be read."""
    try:
        story = read_story(run)
        dead = story.state == "running" and is_dead(_lock_of(run))
    except (TercetError, OSError) as error:  # a file being written, or a damaged one
        return Environment(autoescape=True).from_string(WAITING).render(every=every, why=str(error))
    if dead:
        story = _ended(story)
    return render(story, every if story.state in ("running", "not started") else None)


def _ended(story: Story) -> Story:
    story.state, story.failure = "failed", DEAD
    return story


def _lock_of(run: RunFolder) -> Any:
    try:
        return read_json(run.lock)
    except (TercetError, OSError):
        return None
