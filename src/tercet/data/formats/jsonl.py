"""JSON Lines: one object a line, `{"text": …}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tercet.data import rows
from tercet.data.compressed import open_bytes
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".jsonl", ".ndjson", ".json")
BOM = b"\xef\xbb\xbf"


def sniff(path: Path, head: bytes) -> bool:
    """A .json file is JSON Lines when its first line is a whole object; any other ending is, unless an array of rows
    begins there.
    """
    first, *_ = head.removeprefix(BOM).lstrip().split(b"\n", 1)
    if path.name.lower().rpartition(".json")[2] not in ("", ".gz", ".zst"):
        return not first.startswith(b"[") or _whole_list(first)
    try:
        return isinstance(orjson.loads(first), dict)
    except orjson.JSONDecodeError:
        return False


def _whole_list(line: bytes) -> bool:
    """Whether a line is a list of plain values: a damaged row among rows, not a file that is one array of objects."""
    try:
        return not any(isinstance(v, dict) for v in orjson.loads(line)) and line.strip() != b"[]"
    except orjson.JSONDecodeError:
        return False


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row. A row ends with LF or CRLF; blank lines are counted and passed over."""
    with open_bytes(path) as file:
        yield from _read(file, reading, at_start=True)


def read_range(path: Path, reading: Reading, begin: int, end: int) -> Iterator[Row | Fault]:
    """Yield the rows whose first byte lies in [begin, end) of a file that is not compressed; lines count from there."""
    with path.open("rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()  # what remains of a line that begins before
        yield from _read(_until(file, end), reading, at_start=begin == 0)


def _until(file: BinaryIO, end: int) -> Iterator[bytes]:
    at = file.tell()
    while at < end and (line := file.readline()):
        yield line
        at += len(line)


def _read(lines: Iterable[bytes], reading: Reading, at_start: bool) -> Iterator[Row | Fault]:
    for number, raw in enumerate(lines, 1):
        if number == 1 and at_start:
            if raw.startswith(BOM):
                raw = raw[len(BOM) :]
                reading.seen["byte order mark"] += 1
            elif raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                yield Fault(1, 1, rows.BAD_BYTES, rows.UTF_16, fatal=True)
                return
            if b"\0" in raw:
                yield Fault(1, 1, rows.BAD_BYTES, rows.NULS, fatal=True)
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
        if len(_KEYS.findall(line)) > keys_in(value) and (twice := repeated_key(line.decode())):
            reading.seen["kind: other"] += 1
            yield Fault(number, 1, rows.TWICE, rows.twice_detail(twice), _shown(line))
            continue
        yield rows.judge(value, reading, number, 1, lambda name, s=line: _column(s, name), lambda s=line: _shown(s))


_KEYS = re.compile(rb'"\s*:')  # stands behind every key; within texts it may stand more often


def keys_in(value: Any) -> int:
    """Return how many keys the objects of a JSON value have in all."""
    if type(value) is dict:
        inner = [v for v in value.values() if type(v) is dict or type(v) is list]
        return len(value) + (sum(map(keys_in, inner)) if inner else 0)
    if type(value) is list:
        return sum(keys_in(v) for v in value if type(v) is dict or type(v) is list)
    return 0


def repeated_key(text: str) -> str | None:
    """Return a key that some object in a JSON text has twice, or None. Parsers take the last one and say nothing."""
    found: list[str] = []
    json.loads(text, object_pairs_hook=repeats(found), parse_constant=float)
    return found[0] if found else None


def repeats(found: list[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook for json's parser that adds keys which stand twice in one object to `found`."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [k for k, _ in pairs]
            found.append(next(k for k in names if names.count(k) > 1))
        return value

    return hook


def _explain(line: bytes, number: int, reading: Reading) -> Row | Fault:
    """Return what is wrong with a line that the fast parser refused (or its row, should only that parser
    mind).
    """
    reading.seen["kind: other"] += 1
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        detail = rows.not_utf8(line, error.start, f" at offset {error.start} of the line")
        return Fault(number, column, rows.BAD_BYTES, detail, excerpt(line.decode(errors="replace"), column))
    try:
        constants: list[str] = []
        twice: list[str] = []
        value = json.loads(text, parse_constant=constants.append, object_pairs_hook=repeats(twice))
    except json.JSONDecodeError as error:
        return Fault(number, error.colno, rows.BAD_JSON, error.msg, excerpt(text, error.pos))
    except (ValueError, RecursionError) as error:
        return Fault(number, 1, rows.BAD_JSON, str(error), excerpt(text))
    if twice:
        return Fault(number, 1, rows.TWICE, rows.twice_detail(twice[0]), excerpt(text))
    if constants:
        if type(value) is not dict or not isinstance(value.get(reading.text_column), str):
            return Fault(number, 1, rows.BAD_JSON, f"{_named(text)} is not JSON", excerpt(text))
        reading.seen["NaN or Infinity in columns that nothing reads"] += 1
    reading.seen["kind: other"] -= 1
    found = rows.judge(value, reading, number, 1, lambda name: _column(line, name), lambda: excerpt(text))
    if isinstance(found, Row) and not found.chat and rows.surrogate_at(found.text) >= 0:
        column = _column(line, reading.text_column)
        return Fault(number, column, rows.SURROGATE, rows.SURROGATE_DETAIL, excerpt(text, column))
    return found


def _named(text: str) -> str:
    return next((c for c in ("NaN", "-Infinity", "Infinity") if c in text), "NaN")


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
        key, at = scanstring(text, at + 1)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        if key == name:
            found = at
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at) + 1  # past the comma, or the closing brace
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
