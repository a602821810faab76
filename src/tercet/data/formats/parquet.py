"""Parquet: a column of texts, or the columns of a chat. Lines are row numbers from 1, columns are column numbers from 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tercet.data import rows
from tercet.data.formats.chats import messages_aliases
from tercet.data.rows import Fault, Reading, Row
from tercet.errors import InputError

SUFFIXES = (".parquet", ".pq")
_ROWS = 1024


def sniff(path: Path, head: bytes) -> bool:
    return head.startswith(b"PAR1")


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row. Where there is a text column, only that is decoded. Raises InputError when the file is no Parquet file."""
    yield from _read(path, reading, None)


def read_groups(path: Path, reading: Reading, begin: int, end: int) -> Iterator[Row | Fault]:
    """Yield the rows of row groups [begin, end); lines count from there."""
    yield from _read(path, reading, range(begin, end))


def group_bytes(path: Path) -> list[int]:
    """Return the bytes of each row group, compressed as they lie in the file. Raises as `read` does."""
    with _open(path) as file:
        about = file.metadata
        groups = [about.row_group(n) for n in range(about.num_row_groups)]
        return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


def _open(path: Path) -> Any:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from None


def _read(path: Path, reading: Reading, groups: range | None) -> Iterator[Row | Fault]:
    import pyarrow as arrow

    with _open(path) as file:
        names = file.schema_arrow.names
        wanted = wanted_columns(names, reading)
        chosen = {} if groups is None else {"row_groups": list(groups)}
        try:
            batches = file.iter_batches(batch_size=_ROWS, columns=wanted, **chosen)
            yield from from_batches(batches, names, wanted, reading)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}") from None


def wanted_columns(names: list[str], reading: Reading) -> list[str]:
    """Return the columns to decode: the text column where there is one and no turns, else all."""
    turns = "text" not in reading.columns and any(name in names for name in messages_aliases())
    if reading.layout is None and reading.text_column in names and not turns:
        return [reading.text_column]
    return names


def from_batches(
    batches: Iterable[Any], names: list[str], wanted: list[str], reading: Reading
) -> Iterator[Row | Fault]:
    """Yield every row of record batches that hold the wanted columns; `names`: all columns of the file."""
    number = 0
    for batch in batches:
        columns = [batch.column(n) for n in range(len(wanted))]
        for row in range(batch.num_rows):
            number += 1
            if wanted == [reading.text_column]:
                yield _judge(columns[0][row], number, names.index(wanted[0]) + 1, wanted[0], reading)
            else:
                yield _judge_row(dict(zip(wanted, (c[row] for c in columns), strict=True)), number, names, reading)
    for n in names:
        if n not in wanted:
            reading.seen[f"column: {n}"] += number


def _judge_row(scalars: dict[str, Any], number: int, names: list[str], reading: Reading) -> Row | Fault:
    row: dict[str, Any] = {}
    for name, scalar in scalars.items():
        try:
            row[name] = _without_nulls(scalar.as_py())
        except UnicodeDecodeError as error:
            reading.seen["kind: other"] += 1
            detail = f"byte 0x{error.object[error.start]:02x} at offset {error.start} of {name!r} is not UTF-8"
            return Fault(number, names.index(name) + 1, rows.BAD_BYTES, detail)

    def column_of(name: str) -> int:
        return names.index(name) + 1 if name in names else 1

    return rows.judge(row, reading, number, 1, column_of, lambda: rows.excerpt(str(row)[:200]))


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls inside: Arrow gives every object of a column the keys of all others."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _judge(scalar: Any, number: int, column: int, name: str, reading: Reading) -> Row | Fault:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        reading.seen["kind: other"] += 1
        detail = f"byte 0x{error.object[error.start]:02x} at offset {error.start} of the text is not UTF-8"
        return Fault(number, column, rows.BAD_BYTES, detail, rows.excerpt(error.object.decode(errors="replace")))
    return rows.judge({name: value}, reading, number, column, lambda _: column, lambda: rows.excerpt(str(value)[:200]))
