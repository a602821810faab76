"""Files in parts that can each be read by themselves: byte ranges of JSON Lines, row groups of Parquet, whole files.

Where parts begin follows from sizes alone, so nothing is read to find them. A line of JSON Lines belongs to the part in
which its first byte lies. What cannot be entered in the middle (compressed files, JSON arrays, CSV, plain text) is one
part, whatever its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tercet.data.compressed import COMPRESSED, UNREADABLE
from tercet.data.formats import jsonl, parquet
from tercet.data.rows import Fault, Reading, Row
from tercet.data.sources import File, Source
from tercet.errors import InputError

_SAMPLES, _SAMPLE_BYTES = 17, 1 << 16


@dataclass(frozen=True)
class FilePart(File):
    """What begins in [begin, end) of a file: bytes of JSON Lines, row groups of Parquet."""

    begin: int = 0
    end: int = 0

    def read(self, reading: Reading) -> Iterator[Row | Fault]:
        """Yield every row of the part, with its place in the whole file."""
        read_part = parquet.read_groups if self.format == "parquet" else jsonl.read_range
        try:
            yield from read_part(self.path, reading, self.begin, self.end)
        except UNREADABLE as error:
            raise InputError(f"{self.name} cannot be read to its end: {error}") from None


def cut(source: Source, part_bytes: int) -> list[Source]:
    """Return a source as sources of about `part_bytes` or one file each, in the order of reading."""
    found: list[Source] = []
    waiting: list[File] = []
    for file in source.files:
        for piece in _pieces(file, part_bytes):
            if waiting and sum(f.bytes for f in waiting) + piece.bytes > part_bytes:
                found.append(replace(source, files=tuple(waiting)))
                waiting = []
            waiting.append(piece)
    return [*found, replace(source, files=tuple(waiting))] if waiting else found


def _pieces(file: File, part_bytes: int) -> list[File]:
    packed = file.path.suffix.lower() in COMPRESSED
    if file.format == "jsonl" and not packed and file.bytes > part_bytes:
        count = -(-file.bytes // part_bytes)
        borders = [n * file.bytes // count for n in range(count + 1)]
        sizes = [b - a for a, b in pairwise(borders)]
    elif file.format == "parquet" and file.bytes > part_bytes:
        groups = parquet.group_bytes(file.path)
        borders, sizes = [0], []
        for n, size in enumerate(groups, 1):
            if sizes and sizes[-1] + size <= part_bytes:
                sizes[-1] += size
                borders[-1] = n
            else:
                sizes.append(size)
                borders.append(n)
    else:
        return [file]
    ranges = zip(pairwise(borders), sizes, strict=True)
    return [FilePart(file.path, file.format, size, begin, end) for (begin, end), size in ranges]


def entered_in_the_middle(file: File) -> bool:
    return file.format in ("jsonl", "parquet") and file.path.suffix.lower() not in COMPRESSED


def fingerprints(files: Sequence[File]) -> list[str]:
    """Return a hash of each file's size and of samples of its bytes: as quick for any size, and blind to a change
    between the samples."""
    found = []
    for file in files:
        digest = hashlib.blake2b(str(file.bytes).encode(), digest_size=20)
        with file.path.open("rb") as stream:
            for n in range(_SAMPLES):
                stream.seek(max(0, file.bytes - _SAMPLE_BYTES) * n // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
        found.append(digest.hexdigest())
    return found
