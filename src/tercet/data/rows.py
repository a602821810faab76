"""What a reader yields: a Row (text that can be trained on) or a Fault (a row that cannot, and why).

Rows are judged one by one, never from a type guessed out of the first block of a file, so neither the order
of rows nor a stray column changes the outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.data.chat import EMPTY, MISSING, WRONG_TYPE, UnusableRow, refuse_what_is_no_plain_chat
from tercet.data.formats import chats
from tercet.data.formats.chats.messages import turns_in, unread_of_turns

BAD_JSON = "bad JSON"
NOT_OBJECT = "not an object"
NULL = "null text"
BAD_BYTES = "invalid bytes"
SURROGATE = "lone surrogate"
TWICE = "repeated key"
KNOWN = frozenset((*chats.messages_aliases(), "functions", "id"))
UTF_16 = "the file is UTF-16; save it as UTF-8"
NULS = "the file holds NUL characters, as UTF-16 without a byte order mark does; save it as UTF-8"
SURROGATE_DETAIL = "an escape is half of a surrogate pair and stands for no character"

_TEXT_COLUMNS = ("content", "contents", "body", "document", "passage", "story", "article", "code", "txt")


@dataclass(slots=True)
class Row:
    """One text, or one part of a text that is too long to hold at once.

    `line` and `column` count from 1. `starts` and `ends` say whether the document begins and ends here; a
    row that is a whole document has both. Parts of one document follow one another.
    """

    line: int
    column: int
    text: str
    starts: bool = True
    ends: bool = True
    chat: bool = False  # the text is a chat (chat.Chat.to_text)


@dataclass(slots=True)
class Fault:
    """A row that cannot be used. `fatal` means that the rows after it cannot be found, so it cannot be
    skipped.
    """

    line: int
    column: int
    reason: str
    detail: str
    excerpt: str = ""
    fatal: bool = False
    cure: dict[str, str] | None = None  # the `map` that would read it


@dataclass
class Reading:
    """How to read a file, and what was seen on the way.

    `columns` maps our column name to the file's. `layout` names what every row holds (a module in formats/chats), None:
    each row tells. `part_characters` is the size of the parts in which plain
    text is handed out. `seen` counts what is no fault but worth telling: blank lines, byte order marks,
    CRLF row ends, columns that nothing reads, kinds of rows.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    part_characters: int = 1 << 20
    seen: Counter[str] = field(default_factory=Counter)
    layout: str | None = None

    @property
    def text_column(self) -> str:
        return self.columns.get("text", "text")


def excerpt(text: str, around: int = 0, width: int = 60) -> str:
    """Return at most `width` characters near a place, on one line, safe to print."""
    start = max(0, min(around - width // 3, len(text) - width))
    piece = text[start : start + width]
    piece = "".join(c if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF else f"\\u{ord(c):04x}" for c in piece)
    return f"{'…' if start else ''}{piece}{'…' if start + width < len(text) else ''}"


def not_utf8(data: bytes, at: int, where: str = "") -> str:
    """Return what is said of bytes whose byte `at` is not UTF-8, with the encoding that they probably have."""
    piece = data[at : at + 4096]
    chinese = piece.decode("gb18030", errors="ignore")
    usual = sum(c in "的是了在不我有这，。" for c in chinese)
    if usual and 100 * usual >= len(chinese):
        name, probably = "GB18030", "GB18030 (GBK)"
    elif all(c.isalpha() or c in "‘’‚“”„–—…€«»°§£" for c in piece.decode("cp1252", errors="replace") if c > "\x7f"):
        name, probably = "CP1252", "Windows-1252 (Latin 1)"
    else:
        name = probably = ""
    way = f"; it looks like {probably}: iconv -f {name} -t UTF-8 FILE > NEW" if name else ""
    return f"byte 0x{data[at]:02x}{where} is not UTF-8{way}"


def twice_detail(key: str) -> str:
    """Return what is wrong with a row in which one object has a key twice."""
    return f"the key {excerpt(key)!r} stands twice in one object, so which value is meant cannot be known"


def judge(
    row: Any,
    reading: Reading,
    line: int,
    column: int,
    column_of: Callable[[str], int],
    shown: Callable[[], str],
) -> Row | Fault:
    """Return the Row of a decoded JSON value, or the Fault that it is.

    `column_of(name)` gives the column at which a value stands, `shown()` an excerpt: both are asked for
    only when there is a fault, since finding them costs a second parse.
    """
    if type(row) is not dict:
        reading.seen["kind: other"] += 1
        return Fault(line, column, NOT_OBJECT, f'a row is an object like {{"text": …}}, not {_kind(row)}', shown())
    name = reading.text_column
    text = row.get(name) if reading.layout is None else None
    # Turns beside a text are what the text was rendered from, unless a map names the text.
    if type(text) is str and ("text" in reading.columns or not turns_in(row)):
        reading.seen["kind: text"] += 1
        if len(row) > 1:
            for key in row:
                if key != name:
                    reading.seen[f"column: {excerpt(str(key))}"] += 1
        if text and not text.isspace():
            return Row(line, column, text)
        return Fault(line, column_of(name), EMPTY, f"{name!r} is empty or only white space", shown())
    ours = _renamed(row, reading.columns) if reading.columns else row
    if layout := reading.layout or chats.layout_of(ours):
        return _chat(layout, ours, reading, line, column, column_of, shown)
    reading.seen["kind: other"] += 1
    if name not in row:
        return _unread(name, row, line, column, shown)
    if text is None:
        return Fault(line, column_of(name), NULL, f"{name!r} is null", shown())
    return Fault(line, column_of(name), WRONG_TYPE, f"{name!r} is {_kind(text)}, not a text", shown())


def _renamed(row: dict[Any, Any], columns: Mapping[str, str]) -> dict[Any, Any]:
    """Return the row with the columns that a map names under our names."""
    found = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    return {**{k: v for k, v in row.items() if k not in columns.values()}, **found}


def _chat(
    layout: str,
    row: dict[Any, Any],
    reading: Reading,
    line: int,
    column: int,
    column_of: Callable[[str], int],
    shown: Callable[[], str],
) -> Row | Fault:
    """Return the chat of a row, columns already under our names."""
    reading.seen[f"kind: {layout}"] += 1
    module = chats.layouts()[layout]
    if missing := [name for name in module.NEEDED if name not in row and not module.sniff(row)]:
        reading.seen[f"kind: {layout}"] -= 1
        reading.seen["kind: other"] += 1
        return _unread(missing[0], row, line, column, shown)
    for key in row:
        if key not in module.COLUMNS and row[key] is not None and key not in KNOWN:
            reading.seen[f"column: {excerpt(str(key))}"] += 1
    for key in unread_of_turns(row, reading.columns):
        reading.seen[f"column: {excerpt(f'{key} of a turn')}"] += 1
    try:
        refuse_what_is_no_plain_chat(row)
        text = chats.read(layout, row, reading.columns).to_text()
    except UnusableRow as error:
        place = column if error.column is None else column_of(reading.columns.get(error.column, error.column))
        return Fault(line, place, error.reason, error.detail, shown())
    except UnicodeEncodeError:
        return Fault(line, column, SURROGATE, SURROGATE_DETAIL, shown())
    return Row(line, column, text, chat=True)


def _unread(name: str, row: dict[Any, Any], line: int, column: int, shown: Callable[[], str]) -> Fault:
    """Return the fault of a row without a column, with the mapping that would read it."""
    names = ", ".join(excerpt(repr(k), width=30) for k in list(row)[:6]) or "none"
    cure = _cure(row)
    way = f"; map: {excerpt(chats.flow(cure), width=100)} would read it" if cure else ""
    return Fault(line, column, MISSING, f"no column {name!r} (columns: {names}){way}", shown(), cure=cure)


def _cure(row: dict[Any, Any]) -> dict[str, str] | None:
    """Return the mapping that would read a row: question and answer, or the column that is probably its text."""
    if found := chats.mapping_for(row):
        return found
    texts = [k for k, v in row.items() if isinstance(v, str) and v.strip()]
    usual = next((k for k in texts if k.lower() in _TEXT_COLUMNS), None)
    likely = usual or max(texts, key=lambda k: len(row[k]), default=None)
    return {"text": likely} if likely else None


def surrogate_at(text: str) -> int:
    """Return the index of the first lone surrogate, or -1. Such a text has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
