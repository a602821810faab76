"""Parquet: one column of texts. Lines are row numbers from 1, columns are column numbers from 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tercet.data import rows
from tercet.data.rows import Fault, Reading, Row
from tercet.errors import InputError

SUFFIXES = (".parquet", ".pq")
_ROWS = 1024


def sniff(path: Path, head: bytes) -> bool:
    return head.startswith(b"PAR1")


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row. Only the text column is decoded. Raises InputError when the file is no Parquet file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from None
    with file:
        names = file.schema_arrow.names
        name = reading.text_column
        if name not in names:
            yield from without_text(names, file.metadata.num_rows, reading)
            return
        try:
            yield from from_batches(file.iter_batches(batch_size=_ROWS, columns=[name]), names, reading)
        except (arrow.ArrowInvalid, OSError) as error:
            raise InputError(f"{path} is damaged: {error}") from None


def from_batches(batches: Iterable[Any], names: list[str], reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row of record batches that hold the text column alone; `names`: all columns of the file."""
    name, number = reading.text_column, 0
    for batch in batches:
        for scalar in batch.column(0):
            number += 1
            yield _judge(scalar, number, names.index(name) + 1, name, reading)
    for n in names:
        if n != name:
            reading.seen[f"column: {n}"] += number


def _judge(scalar: Any, number: int, column: int, name: str, reading: Reading) -> Row | Fault:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        reading.seen["kind: other"] += 1
        detail = f"byte 0x{error.object[error.start]:02x} at offset {error.start} of the text is not UTF-8"
        return Fault(number, column, rows.BAD_BYTES, detail, rows.excerpt(error.object.decode(errors="replace")))
    return rows.judge({name: value}, reading, number, column, lambda _: column, lambda: rows.excerpt(str(value)[:200]))


def without_text(names: list[str], count: int, reading: Reading) -> Iterator[Fault]:
    """Every row lacks the column: say so for each, so that the sums add up."""
    row = dict.fromkeys(names)
    for number in range(1, count + 1):
        found = rows.judge(row, reading, number, 1, lambda _: 1, lambda: "")
        assert isinstance(found, Fault)
        yield found
