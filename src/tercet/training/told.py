"""How a rank tells its supervisor why it ends when the disk takes no report: a pipe, which needs no disk."""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from typing import Any

MOST_MESSAGE, MOST_HINT, MOST_ROWS = 600, 300, 20  # a report stays below PIPE_BUF, so that two never mix


def tell(descriptor: int, report: dict[str, Any]) -> None:
    """Write a report into the supervisor's pipe, shortened; never blocks, never raises for a pipe that is gone."""
    short = {
        **report,
        "message": str(report["message"])[:MOST_MESSAGE],
        "hint": str(report["hint"])[:MOST_HINT] if report["hint"] else None,
        "rows": report["rows"][:MOST_ROWS],
    }
    line = json.dumps(short, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    with suppress(OSError):
        os.write(descriptor, line[: select.PIPE_BUF])


class Pipe:
    """The supervisor's end. `write_end` is handed to the ranks."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        for descriptor in (self._read_end, self.write_end):
            os.set_blocking(descriptor, False)

    def close(self) -> list[dict[str, Any]]:
        """Return what was told; call it when the ranks have ended."""
        os.close(self.write_end)
        content = b""
        with suppress(BlockingIOError):  # a process that a rank has left behind may still hold the other end
            while part := os.read(self._read_end, 1 << 16):
                content += part
        os.close(self._read_end)
        reports = []
        for line in content.splitlines():
            with suppress(ValueError):
                reports.append(json.loads(line))
        return reports
