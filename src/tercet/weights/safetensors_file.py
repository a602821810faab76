"""One safetensors file, read by plain reads into memory of our own, or mapped when asked for.

Ranks that fill their shards read: mapped pages count as memory of every process that touched them, so three ranks that read
one file would seem to hold it three times, and on a card machine with little host memory the difference between
"cached" and "held" decides. Whoever uses the weights as they lie maps: nothing is copied. The format is read here for
that reason alone; writing stays with the safetensors library. See docs/decisions/0020.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tercet.errors import InputError
from tercet.spec.families.safetensors_header import read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file that whoever may read its neighbours may read: safetensors makes its files private (0600)."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


class SafetensorsFile:
    """Raises InputError for a file that is cut short or is none. `mapped`: rows are views of a private map."""

    def __init__(self, path: Path, mapped: bool = False):
        self.path, self._mapped = path, mapped
        self._map: Tensor | None = None
        self._header = read_header(path)
        self._file = path.open("rb", buffering=0)

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header[name].shape

    def dtype(self, name: str) -> torch.dtype:
        word = self._header[name].dtype
        if word not in DTYPES:
            raise InputError(f"{self.path}: {name} has the type {word}, which is not read")
        return DTYPES[word]

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) along the first axis; reads those bytes and no others. Safe in threads."""
        if self._mapped and (view := self._view(name, begin, end)) is not None:
            return view
        shape = self.shape(name)
        out = torch.empty(max(0, min(end, shape[0]) - begin), *shape[1:], dtype=self.dtype(name))
        row_bytes = prod(shape[1:]) * out.element_size()
        if out.numel():
            place = self._header[name].begin + begin * row_bytes
            target, have = memoryview(out.view(torch.uint8).numpy().data).cast("B"), 0
            while have < len(target):  # one read returns 2 GB at most
                got = self._read(target[have:], place + have)
                if not got:
                    raise InputError(f"{self.path}: {name} ends after {have} of {out.nbytes} bytes")
                have += got
        return out

    def _read(self, target: memoryview, place: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], place)
        with self.path.open("rb", buffering=0) as file:  # Windows: a place of its own for each thread's read
            file.seek(place)
            return file.readinto(target) or 0

    def _view(self, name: str, begin: int, end: int) -> Tensor | None:
        """Return the rows as they lie in the file, or None when their place does not fit their type's size."""
        if self._map is None:
            size = self.path.stat().st_size
            self._map = torch.empty(0, dtype=torch.uint8).set_(
                torch.UntypedStorage.from_file(str(self.path), False, size)  # pyright: ignore[reportArgumentType]
            )
        first, last = self._header[name].begin, self._header[name].end
        dtype = self.dtype(name)
        if first % dtype.itemsize:
            return None
        return self._map[first:last].view(dtype).view(self.shape(name))[begin:end]
