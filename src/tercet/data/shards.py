"""Packed rows on disk: written once, read through memory maps.

A set is three files: NAME.tokens, the ids of all rows one after another (little-endian uint16 or uint32, no
padding); NAME.documents.npy, where each document begins in it (int64, one more than there are documents);
NAME.rows.npy, the index of each row's first document (int64, one more than there are rows).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tercet.data.pack import pack

_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Rows:
    """A set of packed rows of at most `capacity` tokens. Opened when first used; a copy per process is
    cheap.
    """

    folder: Path
    name: str
    capacity: int
    dtype: str

    @cached_property
    def _tokens(self) -> np.ndarray:
        path = self.folder / f"{self.name}.tokens"
        if path.stat().st_size == 0:
            return np.zeros(0, self.dtype)
        return np.memmap(path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")

    @cached_property
    def _documents(self) -> np.ndarray:
        return np.load(self.folder / f"{self.name}.documents.npy", mmap_mode="r")

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.load(self.folder / f"{self.name}.rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def tokens(self) -> int:
        return int(self._documents[-1])

    @property
    def documents(self) -> int:
        return len(self._documents) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids of the row without padding, lengths of its documents in order)."""
        first, last = self._rows[index], self._rows[index + 1]
        borders = np.asarray(self._documents[first : last + 1])
        return np.asarray(self._tokens[borders[0] : borders[-1]]), np.diff(borders)


class Writer:
    """Takes documents in reading order, and packs them when all are there.

    `append` adds ids to the current document, `end` closes it by the rule for long ones. Documents lie in a
    scratch file meanwhile; memory holds 16 bytes a document and what was not yet written.
    """

    def __init__(self, folder: Path, name: str, capacity: int, dtype: type[np.unsignedinteger]):
        self.folder, self.name, self.capacity = folder, name, capacity
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.scratch = folder / f"{name}.scratch"
        self.file = self.scratch.open("w+b")
        self.lengths = array("q")  # of what is packed
        self.full_lengths = array("q")  # of documents as they came
        self.closed: list[np.ndarray] = []  # documents not yet written
        self.closed_tokens = 0
        self.open: list[np.ndarray] = []  # what was not yet written of the current document
        self.spilled = 0  # tokens of the current document in the file
        self.current = 0

    def append(self, ids: np.ndarray) -> None:
        self.open.append(ids)
        self.current += ids.size
        if self.current - self.spilled > _CHUNK_TOKENS:
            self._write_closed()
            self._write(self.open)
            self.open, self.spilled = [], self.current

    def abandon(self) -> None:
        """Take back the current document."""
        self._keep(0)

    def end(self, rule: str) -> str | None:
        """Close the current document. `rule` for one that is longer than a row: drop, cut or split.

        Returns what befell it ("drop", "cut", "split"), or None when it fits.
        """
        length = self.current
        self.full_lengths.append(length)
        if length <= self.capacity:
            self._keep(length)
            self.lengths.append(length)
            return None
        if rule == "split":
            self._keep(length)
            full, rest = divmod(length, self.capacity)
            self.lengths.extend([self.capacity] * full + [rest] * (rest > 0))
        elif rule == "cut":
            self._keep(self.capacity)
            self.lengths.append(self.capacity)
        else:
            self._keep(0)
        return rule

    def _keep(self, tokens: int) -> None:
        """Close the current document with its first `tokens` tokens."""
        if self.spilled > tokens:
            self.file.truncate(self.file.tell() - (self.spilled - tokens) * self.dtype.itemsize)
            self.file.seek(0, 2)
        elif tokens == self.current:
            self.closed += self.open
            self.closed_tokens += tokens - self.spilled
        elif tokens > self.spilled:
            self.closed.append(np.concatenate(self.open)[: tokens - self.spilled])
            self.closed_tokens += tokens - self.spilled
        self.open, self.spilled, self.current = [], 0, 0
        if self.closed_tokens > _CHUNK_TOKENS:
            self._write_closed()

    def _write_closed(self) -> None:
        self._write(self.closed)
        self.closed, self.closed_tokens = [], 0

    def _write(self, parts: list[np.ndarray]) -> None:
        if parts:
            self.file.write(np.concatenate(parts).astype(self.dtype).data)

    def finish(self) -> Rows:
        """Pack what was taken and write the set. The scratch file is removed."""
        self._write_closed()
        self.file.close()
        lengths = np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else np.zeros(0, np.int64)
        order, rows = pack(lengths, self.capacity)
        starts = np.concatenate(([0], np.cumsum(lengths)))[order] if lengths.size else lengths
        sizes = lengths[order]
        ends = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        np.save(self.folder / f"{self.name}.documents.npy", ends)
        firsts = np.flatnonzero(np.diff(rows, prepend=-1)) if rows.size else rows
        np.save(self.folder / f"{self.name}.rows.npy", np.append(firsts, rows.size).astype(np.int64))
        with (self.folder / f"{self.name}.tokens").open("wb") as file:
            if lengths.size:
                scratch = np.memmap(self.scratch, dtype=self.dtype, mode="r")
                self._copy(scratch, file, starts, sizes, ends)
                del scratch
        self.scratch.unlink()
        return Rows(self.folder, self.name, self.capacity, self.dtype.name)

    @staticmethod
    def _copy(scratch: np.ndarray, file, starts: np.ndarray, sizes: np.ndarray, ends: np.ndarray) -> None:
        """Write documents in packed order, a few million tokens at a time."""
        at = 0
        while at < sizes.size:
            stop = int(np.searchsorted(ends, ends[at] + _CHUNK_TOKENS, side="right")) - 1
            stop = max(stop, at + 1)
            shift = np.repeat(starts[at:stop] - (ends[at:stop] - ends[at]), sizes[at:stop])
            file.write(scratch[shift + np.arange(shift.size)].data)
            at = stop
