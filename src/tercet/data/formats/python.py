"""Python source: the strings of dictionaries and lists written out at the top of a .py file, a document each.

The file is parsed, never imported or executed. It is how text that ships with an installed package is
reached, such as CPython's own language reference in `package:pydoc_data/topics.py`.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tercet.data import rows
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".py",)


def sniff(path: Path, head: bytes) -> bool:
    return True


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every string value of the top-level dict and list literals; other values are counted, not read."""
    try:
        with tokenize.open(path) as file:  # honours the file's own encoding line
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        column = getattr(error, "offset", None) or 1
        reason = rows.BAD_BYTES if isinstance(error, UnicodeDecodeError) else "bad Python"
        yield Fault(line, column, reason, f"the file cannot be parsed: {error}", fatal=True)
        return
    for statement in tree.body:
        value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        nodes = value.values if isinstance(value, ast.Dict) else value.elts if isinstance(value, ast.List) else []
        for node in nodes:
            found = _judge(node, reading)
            if found is not None:
                yield found


def _judge(node: ast.expr, reading: Reading) -> Row | Fault | None:
    try:
        text = ast.literal_eval(node)
    except (ValueError, TypeError):
        text = None
    if not isinstance(text, str):
        reading.seen["values that are no text"] += 1
        return None
    line, column = node.lineno, node.col_offset + 1
    reading.seen["kind: text"] += 1
    if not text or text.isspace():
        return Fault(line, column, rows.EMPTY, "the text is empty or only white space", excerpt(repr(text)))
    if rows.surrogate_at(text) >= 0:
        return Fault(line, column, rows.SURROGATE, "an escape is half of a surrogate pair", excerpt(text))
    return Row(line, column, text)
