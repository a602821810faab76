"""JSON Lines: one object a line, `{"text": …}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tercet.data import rows
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".jsonl", ".ndjson", ".json")
BOM = b"\xef\xbb\xbf"


def sniff(path: Path, head: bytes) -> bool:
    """A .json file is JSON Lines when its first line is a whole object and more than that follows or
    nothing does.
    """
    if path.suffix.lower() != ".json":
        return True
    first, *_ = head.removeprefix(BOM).lstrip().split(b"\n", 1)
    try:
        return isinstance(orjson.loads(first), dict)
    except orjson.JSONDecodeError:
        return False


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row. A row ends with LF or CRLF; blank lines are counted and passed over."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                if raw.startswith(BOM):
                    raw = raw[len(BOM) :]
                    reading.seen["byte order mark"] += 1
                elif raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                    yield Fault(1, 1, rows.BAD_BYTES, "the file is UTF-16; save it as UTF-8", fatal=True)
                    return
            if raw.endswith(b"\r\n"):
                reading.seen["CRLF"] += 1
            line = raw.rstrip(b"\r\n")
            if not line or line.isspace():
                reading.seen["blank lines"] += 1
                continue
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                yield _explain(line, number, reading)
                continue
            yield rows.judge(value, reading, number, 1, lambda name, s=line: _column(s, name), lambda s=line: _shown(s))


def _explain(line: bytes, number: int, reading: Reading) -> Row | Fault:
    """Return what is wrong with a line that the fast parser refused (or its row, should only that parser
    mind).
    """
    reading.seen["kind: other"] += 1
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        detail = f"byte 0x{line[error.start]:02x} at offset {error.start} of the line is not UTF-8"
        return Fault(number, column, rows.BAD_BYTES, detail, excerpt(line.decode(errors="replace"), column))
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        return Fault(number, error.colno, rows.BAD_JSON, error.msg, excerpt(text, error.pos))
    except (ValueError, RecursionError) as error:
        return Fault(number, 1, rows.BAD_JSON, str(error), excerpt(text))
    reading.seen["kind: other"] -= 1
    found = rows.judge(value, reading, number, 1, lambda name: _column(line, name), lambda: excerpt(text))
    if isinstance(found, Row) and rows.surrogate_at(found.text) >= 0:
        column = _column(line, reading.text_column)
        return Fault(number, column, rows.SURROGATE, rows.SURROGATE_DETAIL, excerpt(text, column))
    return found


def refuse_constant(name: str) -> Any:
    """Raise ValueError: Python's parser would take NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _shown(line: bytes) -> str:
    return excerpt(line[:400].decode(errors="ignore"))


def _column(line: bytes, name: str) -> int:
    """Return the column (from 1, in characters) at which the value of a top-level key stands."""
    return value_column(line.decode(), name, 0) + 1


_SPACE = re.compile(r"[ \t\n\r]*")


def value_column(text: str, name: str, start: int) -> int:
    """Return the index of the last value under `name` in the object that begins at or after `start`."""
    decoder = json.JSONDecoder()
    found = start
    at = _skip(text, start) + 1  # past the brace
    while at < len(text) and text[at := _skip(text, at)] == '"':
        key, at = json.decoder.scanstring(text, at + 1)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        if key == name:
            found = at
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at) + 1  # past the comma, or the closing brace
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
