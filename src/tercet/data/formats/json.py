"""JSON: one array of objects, `[{"text": …}, …]`. Read piece by piece, so that the file need not fit in
memory.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tercet.data import rows
from tercet.data.compressed import open_bytes
from tercet.data.formats import jsonl
from tercet.data.formats.jsonl import repeats, value_column
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".json", ".jsonl", ".ndjson")  # an array is an array, whatever its file is called
_BLOCK = 1 << 20
_SPACE = " \t\n\r"


def sniff(path: Path, head: bytes) -> bool:
    return not jsonl.sniff(path, head)


class _Window:
    """The part of a file that is being parsed, as text; knows the line and column of every index in it."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0  # index of the parser in `text`
        self.line = 1
        self.column = 1
        self.ended = False

    def more(self) -> bool:
        """Read on (twice as much each time one value does not fit, so that the work stays linear)."""
        block = b"" if self.ended else self.file.read(max(_BLOCK, len(self.text) - self.at))
        if not block:
            self.decode.decode(b"", final=True)  # raises when the file ends within a character
            self.ended = True
            return False
        self.move(self.at)
        self.text = self.text[self.at :] + self.decode.decode(block)
        self.at = self._counted = 0
        return True

    _counted = 0

    def move(self, index: int) -> tuple[int, int]:
        """Return (line, column) of an index, which must not lie before the one asked for last."""
        newlines = self.text.count("\n", self._counted, index)
        if newlines:
            self.line += newlines
            self.column = index - self.text.rfind("\n", self._counted, index)
        else:
            self.column += index - self._counted
        self._counted = index
        return self.line, self.column

    def peek(self) -> str:
        """Return the next character that is no white space, or "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every element. After a syntax error the elements behind it cannot be found: that fault is
    fatal.
    """
    with open_bytes(path) as stream:
        file: Any = stream
        if file.peek(3)[:3] == codecs.BOM_UTF8:
            reading.seen["byte order mark"] += 1
        window = _Window(file)
        try:
            yield from _elements(window, reading)
        except UnicodeDecodeError as error:
            offset = file.tell() - len(error.object) + error.start
            before = error.object[: error.start]
            line = window.line + window.text.count("\n", window._counted) + before.count(b"\n")
            detail = rows.not_utf8(error.object, error.start, f" at offset {offset} of the file")
            shown = excerpt(before[-60:].decode(errors="ignore"))
            yield Fault(line, 1, rows.BAD_BYTES, detail, shown, fatal=True)


def _elements(window: _Window, reading: Reading) -> Iterator[Row | Fault]:
    twice: list[str] = []
    decoder = json.JSONDecoder(object_pairs_hook=repeats(twice))
    first = window.peek()
    if "\0" in window.text[:64]:
        yield Fault(1, 1, rows.BAD_BYTES, rows.NULS, fatal=True)
        return
    if first != "[":
        what = "empty" if not first else "an object" if first == "{" else f"something that begins with {first!r}"
        line, column = window.move(window.at)
        detail = f'the file is {what}; a JSON file of rows is an array of objects: [{{"text": …}}, …]'
        yield Fault(line, column, rows.BAD_JSON, detail, excerpt(window.text[:200]), fatal=True)
        return
    window.at += 1
    wanted = "a row or ]"
    while (character := window.peek()) != "]":
        if wanted == "a comma or ]":
            if character != ",":
                yield _broken(
                    window,
                    f"expected a comma or ], found {character!r}" if character else "the array is not closed",
                )
                return
            window.at += 1
            wanted = "a row"
            continue
        start = window.at
        while True:
            twice.clear()
            try:
                value, end = decoder.raw_decode(window.text, start)
            except json.JSONDecodeError as error:
                # Perhaps the value only goes on behind what was read so far.
                if window.more():
                    start = 0
                    continue
                yield _broken(window, error.msg, max(error.pos, window.at))
                return
            except (ValueError, RecursionError) as error:
                yield _broken(window, str(error))
                return
            # A number or a word at the very end of the window could go on as well.
            if end == len(window.text) and window.more():
                start = 0
                continue
            break
        yield _judge(window, value, start, end, reading, twice)
        window.at = end
        wanted = "a comma or ]"
    window.at += 1
    if window.peek():
        yield _broken(window, "something follows behind the closing ]")


def _judge(window: _Window, value: object, start: int, end: int, reading: Reading, twice: list[str]) -> Row | Fault:
    line, column = window.move(start)
    text = window.text

    def column_of(name: str) -> int:
        index = value_column(text, name, start)
        newline = text.rfind("\n", start, index)
        return index - newline if newline >= 0 else column + index - start

    def shown() -> str:
        return excerpt(text[start : min(end, start + 200)])

    if twice:
        reading.seen["kind: other"] += 1
        return Fault(line, column, rows.TWICE, rows.twice_detail(twice[0]), shown())
    read = value.get(reading.text_column) if isinstance(value, dict) else None
    if isinstance(read, float) and not math.isfinite(read):
        reading.seen["kind: other"] += 1
        return Fault(line, column, rows.BAD_JSON, "NaN and Infinity are not JSON", shown())
    found = rows.judge(value, reading, line, column, column_of, shown)
    if isinstance(found, Row) and not found.chat and rows.surrogate_at(found.text) >= 0:
        place = column_of(reading.text_column)
        return Fault(line, place, rows.SURROGATE, rows.SURROGATE_DETAIL, shown())
    return found


def _broken(window: _Window, message: str, index: int | None = None) -> Fault:
    index = window.at if index is None else index
    line, column = window.move(index)
    detail = f"{message}; the rows behind it cannot be found"
    return Fault(line, column, rows.BAD_JSON, detail, excerpt(window.text, index), fatal=True)
