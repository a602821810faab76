"""Plain text: a file is one document, handed out in parts that follow one another without a gap."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from tercet.data import rows
from tercet.data.compressed import open_bytes
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".txt", ".md", ".text", ".rst", ".log")
_BLOCK = 1 << 20


def sniff(path: Path, head: bytes) -> bool:
    return True


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield the file in parts of about `reading.part_characters`, cut in front of a line.

    The file is decoded twice: a bad byte anywhere makes the whole document unusable, and that must be known
    before its first part is handed out.
    """
    if fault := _check(path):
        reading.seen["kind: other"] += 1
        yield fault
        return
    reading.seen["kind: text"] += 1
    pending, line = "", 1
    first = True
    for text in _blocks(path, reading):
        pending += text
        while len(pending) > 2 * reading.part_characters:
            cut = _cut(pending, reading.part_characters)
            yield Row(line, 1, pending[:cut], starts=first, ends=False)
            line += pending.count("\n", 0, cut)
            pending, first = pending[cut:], False
    while len(pending) > reading.part_characters * 3 // 2:
        cut = _cut(pending, reading.part_characters)
        yield Row(line, 1, pending[:cut], starts=first, ends=False)
        line += pending.count("\n", 0, cut)
        pending, first = pending[cut:], False
    yield Row(line, 1, pending, starts=first, ends=True)


def _cut(text: str, size: int) -> int:
    """Return where to cut: in front of a paragraph, else of a line, else of a word, near `size`; else at
    `size`.
    """
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, size // 2, size)
        if at > 0:
            # The break stays with the text before it, so that no part begins with white space that is cut
            # in two.
            end = at + len(mark)
            while end < len(text) and text[end] == mark[0]:
                end += 1
            return end if mark != " " else at
    return size


def _blocks(path: Path, reading: Reading) -> Iterator[str]:
    """Yield decoded blocks, with the byte order mark taken off and CRLF read as the end of a line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    with open_bytes(path) as file:
        start = file.read(3)
        if start == codecs.BOM_UTF8:
            reading.seen["byte order mark"] += 1
            start = b""
        while block := start + file.read(_BLOCK):
            start = b""
            text = held + decoder.decode(block)
            held = ""
            if text.endswith("\r"):  # its LF may stand in the next block
                text, held = text[:-1], "\r"
            if "\r\n" in text:
                reading.seen["CRLF"] += text.count("\r\n")
                text = text.replace("\r\n", "\n")
            yield text
    yield held + decoder.decode(b"", final=True)


def _check(path: Path) -> Fault | None:
    """Return the first fault of the file as a whole: bytes that are not UTF-8, or nothing but white space."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, offset, column, blank = 1, 0, 1, True
    with open_bytes(path) as file:
        while True:
            block = file.read(_BLOCK)
            held = decoder.getstate()[0]
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                before = error.object[: error.start]
                line += before.count(b"\n")
                row = before.rpartition(b"\n")[2].decode()
                column = len(row) + (1 if b"\n" in before else column)
                place = offset - len(held) + error.start
                if place == 0 and error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    return Fault(1, 1, rows.BAD_BYTES, rows.UTF_16)
                detail = rows.not_utf8(error.object, error.start, f" at offset {place} of the file")
                return Fault(line, column, rows.BAD_BYTES, detail, excerpt(row, len(row)))
            if not block:
                break
            if "\0" in text:
                line += text.count("\n", 0, text.index("\0"))
                return Fault(line, 1, rows.BAD_BYTES, rows.NULS)
            offset += len(block)
            line += text.count("\n")
            column = len(text) - text.rfind("\n") if "\n" in text else column + len(text)
            blank = blank and (not text.removeprefix("\ufeff") or text.removeprefix("\ufeff").isspace())
    return Fault(1, 1, rows.EMPTY, "the file is empty or only white space") if blank else None
