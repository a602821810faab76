"""Files that may be compressed (gzip, zstd), read as if they were not."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

COMPRESSED = frozenset((".gz", ".zst"))
# What reading a file that is damaged or forbidden raises; pyarrow's own errors are ValueErrors and OSErrors.
UNREADABLE = (OSError, EOFError, zlib.error)


def open_bytes(path: Path) -> BinaryIO:
    """Return a file's bytes as a buffered stream. Raises what UNREADABLE lists, now or while it is read."""
    ending = path.suffix.lower()
    if ending == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if ending == ".zst":
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(cast(Any, _Raw(pyarrow.input_stream(str(path), compression="zstd")))))
    return path.open("rb")


class _Raw(io.RawIOBase):
    """pyarrow's stream as Python's raw stream, which can be buffered and told its place."""

    def __init__(self, stream: Any):
        self._stream, self._at = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read(len(buffer))
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._stream.close()
        super().close()
