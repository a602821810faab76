"""Warnings of any rank on the console: the first of each kind, with its rank; all of them are in the rank's log."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from pathlib import Path
from typing import Any, TextIO

WARNED = "warned"  # folder in logs/: one empty file per kind that a rank has shown
LONGEST = 500


def show_warnings(console: io.TextIOBase | TextIO, rank: int, shown: Path) -> None:
    """Show records of level WARNING and above, whoever logs them, and Python's own warnings.

    Hooked into the making of records, not into a logger: libraries give theirs handlers of their own and cut them off
    from the root. Ranks agree by files in `shown` on who is the first with a kind.
    """
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(logging.StreamHandler())  # into the log; by itself it has none
    plain = logging.getLogRecordFactory()

    def make(*args: Any, **more: Any) -> logging.LogRecord:
        record = plain(*args, **more)
        if record.levelno >= logging.WARNING and _is_first(record, shown):
            console.write(f"rank {rank}: {sentence_of(record)}\n")
        return record

    logging.setLogRecordFactory(make)


def sentence_of(record: logging.LogRecord) -> str:
    """Return a record in one line; a Python warning loses the source line that follows it."""
    text = record.getMessage().strip()
    lines = text.splitlines() or [""]
    text = lines[0] if record.name == "py.warnings" else " ".join(line.strip() for line in lines)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def _is_first(record: logging.LogRecord, shown: Path) -> bool:
    """Return whether no rank has shown this kind: the same logger, place and words but for their numbers."""
    words = re.sub(r"\d+", "0", f"{record.name} {record.pathname} {record.msg} {record.args or ''}")
    try:
        shown.mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).hexdigest()
        os.close(os.open(shown / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    except FileExistsError:
        return False
    except OSError:  # a full disk: better twice than never
        return True
