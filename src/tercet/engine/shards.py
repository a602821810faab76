"""What an engine writes into a checkpoint: row ranges of every tensor, in safetensors, one file a rank.

File `rank-N.safetensors` (more of them, `rank-N-group-M` or `rank-N-piece-M`, for state that does not fit into memory)
holds, for each parameter, the rows that rank N updates: `weights/NAME` and the moments `exp_avg/NAME`,
`exp_avg_sq/NAME`, all fp32; its metadata gives the first row of each. Reading takes any rows from
whichever files hold them, so another number of ranks, another layout or another engine finds what it needs.
An engine that cuts parameters within rows (DeepSpeed) writes ranges of flattened elements instead: the metadata's
layout is then `flat` and its numbers count elements.
No PyTorch distributed checkpoint here: its metadata file is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from tercet.errors import InputError
from tercet.parallel.room import free_bytes
from tercet.spec import saving
from tercet.spec.saving import copies_fit
from tercet.weights.writing import save_tensors


def file_hash(path: Path) -> str:
    """Return the blake2b hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


@dataclass(frozen=True)
class SavedFile:
    """One file of a save. `rows`: parameter name -> first row, or first element when the layout is flat."""

    path: Path
    tensors: dict[str, Tensor]
    rows: dict[str, int]


class Save:
    """One rank's files being written, in a thread of its own when `background`.

    What is saved is of one step. In the background every tensor is copied first, wherever it lies, since the next
    step changes it; parts are then all taken at once. Otherwise they are asked for and written one after another
    before this returns, so an engine whose state is not in memory brings it piece by piece.
    """

    def __init__(
        self,
        parts: Callable[[], Iterable[SavedFile]],
        position: dict[str, Any],
        background: bool,
        layout: str = "rows",
        engine: str = "native",
    ):
        """`position`: the engine's counts of steps."""
        self.background = background
        self._metadata = {"position": json.dumps(position), "layout": layout, "engine": engine}
        if background:
            copies = [replace(part, tensors={k: copied(t) for k, t in part.tensors.items()}) for part in parts()]
            self._parts: Callable[[], Iterable[SavedFile]] = lambda: copies
        else:
            self._parts = lambda: (piece for part in parts() for piece in pieces(part))
        self.again()

    def again(self) -> None:
        """Write (once more) what this save holds."""
        self._error: BaseException | None = None
        self._result: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if self.background else None
        if self._thread:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            for part in self._parts():
                write_file(part.path, part.tensors, {"rows": json.dumps(part.rows), **self._metadata})
                size = part.path.stat().st_size
                self._result[part.path.name] = {"bytes": size, "blake2b": file_hash(part.path)}
        except BaseException as error:  # handed to the rank that waits, whatever it is
            self._error = error

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> dict[str, Any]:
        if self._thread:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


def copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host that no later step changes, of a tensor on a card as of one on the host."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def on_cards(tensors: Iterable[Tensor]) -> bool:
    """Return whether any lies on a card. Its copy to the host is taken at once and written behind the next steps.

    For state that lies in host memory already a copy would cost as much memory again: it is written at once.
    """
    return any(tensor.device.type != "cpu" for tensor in tensors)


def room_for_copies(copies_bytes: float, ranks: int) -> bool:
    """Return whether this rank's share of the host's free memory takes a copy of what it saves."""
    return copies_fit(copies_bytes, free_bytes(torch.device("cpu"), ranks))


def pieces(part: SavedFile) -> Iterator[SavedFile]:
    """Cut a part that lies on a card into files of PIECE_BYTES at most, one larger tensor excepted."""
    if not on_cards(part.tensors.values()):
        yield part
        return
    groups: list[dict[str, Tensor]] = []
    size = 0
    for key, tensor in part.tensors.items():
        if not groups or size + tensor.nbytes > saving.PIECE_BYTES:
            groups.append({})
            size = 0
        groups[-1][key] = tensor
        size += tensor.nbytes
    for n, tensors in enumerate(groups):
        path = part.path if len(groups) == 1 else part.path.with_stem(f"{part.path.stem}-piece-{n}")
        yield SavedFile(path, tensors, {name: part.rows[name] for name in (key.partition("/")[2] for key in tensors)})


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write one file; when this returns its bytes are on the disk."""
    save_tensors(path, {k: t.detach() for k, t in tensors.items()}, metadata)
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Piece:
    """Part of a tensor in one file: rows [begin, end), or elements when `flat`."""

    begin: int
    end: int
    path: Path
    flat: bool


class Reader:
    """Rows or elements of any tensor of a checkpoint, memory-mapped. Raises InputError that names what is missing."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._pieces: dict[str, list[Piece]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                rows = json.loads(metadata["rows"])
                self.position: dict[str, Any] = json.loads(metadata["position"])
                self.engine: str = metadata.get("engine", "native")
                flat = metadata.get("layout") == "flat"
                for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    begin = rows[key.partition("/")[2]]
                    length = file.get_slice(key).get_shape()[0]
                    self._pieces.setdefault(key, []).append(Piece(begin, begin + length, path, flat))
        if not self._pieces:
            raise InputError(f"{folder} holds no rank files")

    def keys(self) -> set[str]:
        return set(self._pieces)

    def read_into(self, key: str, begin: int, target: Tensor) -> None:
        """Copy rows [begin, begin + len(target)) of `key` into target."""
        row = target.shape[1:]
        self.read_elements(key, begin * row.numel(), target.view(-1), row)

    def read_elements(self, key: str, begin: int, target: Tensor, row: tuple[int, ...]) -> None:
        """Copy elements [begin, begin + len(target)) of the flattened `key`, whose rows have shape `row`."""
        end, have, size = begin + target.shape[0], 0, prod(row)
        for piece in self._pieces.get(key, ()):
            unit = 1 if piece.flat else size
            low, high = max(begin, piece.begin * unit), min(end, piece.end * unit)
            if low >= high:
                continue
            first, last = low // unit, -(-high // unit)  # whole rows around the elements
            with safe_open(piece.path, framework="pt") as file:
                found = file.get_slice(key)[first - piece.begin : last - piece.begin]
            if not piece.flat and tuple(found.shape[1:]) != tuple(row):
                raise InputError(
                    f"{piece.path}: {key} has rows of shape {tuple(found.shape[1:])}, expected {tuple(row)}",
                    "The checkpoint is of another model.",
                )
            target[low - begin : high - begin].copy_(found.reshape(-1)[low - first * unit : high - first * unit])
            have += high - low
        if have != end - begin:
            raise InputError(f"{self._folder}: {key} is missing rows: {have} of {end - begin} elements found")


def restored(reader: Reader, engine: str) -> list[str]:
    """Return what a load brought back, for the user; says so when another engine had written it."""
    words = ["weights", "exp_avg", "exp_avg_sq", "position"]
    return words if reader.engine == engine else [*words, f"all written by the {reader.engine} engine"]


class Provider(Protocol):
    """Weights that an engine starts from, on the CPU, in the type stored (weights/stored.py: Stored)."""

    def tensor(self, name: str) -> Tensor: ...

    def rows(self, name: str, begin: int, end: int) -> Tensor: ...
