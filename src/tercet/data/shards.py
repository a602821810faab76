"""Packed rows on disk: written once, read through memory maps.

A set is three files: NAME.tokens, the ids of all rows one after another (little-endian uint16 or uint32, no
padding); NAME.documents.npy, where each document begins in it (int64, one more than there are documents);
NAME.rows.npy, the index of each row's first document (int64, one more than there are rows). A set in which some
tokens are not trained, as in chats, has NAME.trained besides: a byte per token, the number of its loss weight in the
set's palette, 0 where it is read but not trained.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tercet.data.pack import pack
from tercet.errors import InputError

_CHUNK_TOKENS = 1 << 20
_SHIFT = np.uint32(24)
_ID = np.uint32(2**24 - 1)


@dataclass(frozen=True)
class Rows:
    """A set of packed rows of at most `capacity` tokens. Opened when first used; a copy per process is
    cheap.
    """

    folder: Path
    name: str
    capacity: int
    dtype: str
    palette: tuple[float, ...] | None = None  # loss weights by number; None: every token is trained and counts once

    @cached_property
    def _tokens(self) -> np.ndarray:
        path = self.folder / f"{self.name}.tokens"
        if path.stat().st_size == 0:
            return np.zeros(0, self.dtype)
        return np.memmap(path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")

    @cached_property
    def _trained(self) -> np.ndarray:
        path = self.folder / f"{self.name}.trained"
        return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)

    @cached_property
    def _weight_of(self) -> np.ndarray:
        return np.array(self.palette, dtype=np.float32)

    @cached_property
    def _documents(self) -> np.ndarray:
        return np.load(self.folder / f"{self.name}.documents.npy", mmap_mode="r")

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.load(self.folder / f"{self.name}.rows.npy", mmap_mode="r")

    def opened(self) -> Rows:
        """Return itself with every file open: they may be removed from then on."""
        for name in ("_tokens", "_documents", "_rows", *(("_trained",) if self.palette is not None else ())):
            getattr(self, name)
        return self

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

    def trained(self, index: int) -> np.ndarray | None:
        """Return the loss weight of each token of a row (float32, 0: not trained), or None where all count once."""
        if self.palette is None:
            return None
        first, last = (int(self._documents[self._rows[n]]) for n in (index, index + 1))
        return self._weight_of[self._trained[first:last]]

    @property
    def trained_tokens(self) -> int:
        """Tokens that are predicted and count: all but the first of a document, or those that are marked."""
        if self.palette is None:
            return self.tokens - self.documents
        return int(np.count_nonzero(self._trained))


class Palette:
    """The different loss weights of a data set, each under a number that fits in a byte."""

    def __init__(self) -> None:
        self._numbers: dict[float, int] = {0.0: 0, 1.0: 1}

    def number(self, weight: float) -> int:
        """Return the number of a weight. Raises InputError when there are more different ones than numbers."""
        if weight not in self._numbers and len(self._numbers) > 255:
            raise InputError("the data has more than 254 different loss weights", "Round them to fewer.")
        return self._numbers.setdefault(weight, len(self._numbers))

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(self._numbers)


class Writer:
    """Takes documents in reading order, and packs them when all are there.

    `append` adds ids to the current document, `end` closes it by the rule for long ones. Documents lie in a
    scratch file meanwhile; memory holds 16 bytes a document and what was not yet written.
    """

    def __init__(
        self, folder: Path, name: str, capacity: int, dtype: type[np.unsignedinteger], palette: Palette | None = None
    ):
        self.folder, self.name, self.capacity, self.palette = folder, name, capacity, palette
        self.final = np.dtype(dtype).newbyteorder("<")
        # Beside a palette a token's number lies in the upper byte of its id until the set is packed.
        self.dtype = self.final if palette is None else np.dtype("<u4")
        self.scratch = folder / f"{name}.scratch"
        self.file = self.scratch.open("w+b")
        self.lengths = array("q")  # of what is packed
        self.full_lengths = array("q")  # of documents as they came
        self.closed: list[np.ndarray] = []  # documents not yet written
        self.closed_tokens = 0
        self.open: list[np.ndarray] = []  # what was not yet written of the current document
        self.spilled = 0  # tokens of the current document in the file
        self.current = 0

    def append(self, ids: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Add ids; `trained`: numbers of their weights in the palette, without them 1 each."""
        if self.palette is not None and ids.size:
            numbers = np.ones(ids.size, np.uint32) if trained is None else trained.astype(np.uint32)
            ids = ids.astype(np.uint32) | (numbers << _SHIFT)
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

        Returns what was done with it ("drop", "cut", "split"), or None when it fits.
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

    def close(self) -> None:
        """Close the current document, which fits; its length as it came is counted by whoever cut it."""
        self.lengths.append(self.current)
        self._keep(self.current)

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
        with ExitStack() as files:
            tokens = files.enter_context((self.folder / f"{self.name}.tokens").open("wb"))
            trained = None
            if self.palette is not None:
                trained = files.enter_context((self.folder / f"{self.name}.trained").open("wb"))
            if lengths.size:
                scratch = np.memmap(self.scratch, dtype=self.dtype, mode="r")
                for part in self._parts(scratch, starts, sizes, ends):
                    if trained is not None:
                        trained.write((part >> _SHIFT).astype(np.uint8).data)
                        part = (part & _ID).astype(self.final)
                    tokens.write(part.data)
                del scratch
        self.scratch.unlink()
        return Rows(self.folder, self.name, self.capacity, self.final.name, self.palette and self.palette.weights)

    def _parts(
        self, scratch: np.ndarray, starts: np.ndarray, sizes: np.ndarray, ends: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield documents in packed order, a few million tokens at a time."""
        at = 0
        while at < sizes.size:
            stop = int(np.searchsorted(ends, ends[at] + _CHUNK_TOKENS, side="right")) - 1
            stop = max(stop, at + 1)
            shift = np.repeat(starts[at:stop] - (ends[at:stop] - ends[at]), sizes[at:stop])
            part = scratch[shift + np.arange(shift.size)]
            if self.palette is not None:
                part[ends[at:stop] - ends[at]] &= _ID  # nothing stands before a document's first token to predict it
            yield part
            at = stop
