"""Arrow streams and files, as `save_to_disk` writes them. Lines are row numbers from 1, columns column numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tercet.data.formats.parquet import from_batches, wanted_columns
from tercet.data.rows import Fault, Reading, Row
from tercet.errors import InputError

SUFFIXES = (".arrow", ".feather")


def sniff(path: Path, head: bytes) -> bool:
    return True


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every row. Raises InputError when the file is damaged."""
    import pyarrow as arrow

    try:
        with arrow.memory_map(str(path)) as source:
            batches, names = _open(source)
            wanted = wanted_columns(names, reading)
            yield from from_batches((b.select(wanted) for b in batches), names, wanted, reading)
    except (arrow.ArrowInvalid, arrow.ArrowIOError, arrow.ArrowKeyError, OSError) as error:
        raise InputError(f"{path} is not an Arrow file, or damaged: {error}") from None


def _open(source: Any) -> tuple[Any, list[str]]:
    """Return (record batches, column names) of a stream or a file, which are two layouts."""
    import pyarrow as arrow

    head = source.read(6)
    source.seek(0)
    if head == b"ARROW1":
        file = arrow.ipc.open_file(source)
        return (file.get_batch(n) for n in range(file.num_record_batches)), file.schema.names
    stream = arrow.ipc.open_stream(source)
    return stream, stream.schema.names
