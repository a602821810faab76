"""Placement: where each tensor lies. Which rows a rank holds, trained or not, in which formats, on card, host or file.

`Rules` say how a strategy places tensors; `place` gives one tensor's placement under them. What a plan's ledger shows
of weights, master copies, gradients and optimizer is a sum over placements, on the cards and on the host alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tercet.spec.adapter import nf4_bytes
from tercet.spec.axes.split import chunk
from tercet.spec.model import Tensor
from tercet.spec.optimizers.blocks import moment_bytes

LedgerRow = Literal["weights", "master", "gradients", "optimizer"]
Place = Literal["card", "host", "file"]


@dataclass(frozen=True)
class Region:
    """The rows [begin, end) of a tensor's first dimension that a rank updates; `stored` is what its shard has room for.

    Shards are padded to the first rank's size, so `stored` may exceed the rows.
    """

    begin: int
    end: int
    stored: int

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.end)


def region(rows: int, parts: int, part: int) -> Region:
    """Return a part's rows as torch.chunk and Shard(0) cut them: 64 over 3 is 22, 22, 20, each stored as 22."""
    sizes = chunk(rows, parts)
    begin = sum(sizes[:part])
    return Region(begin, begin + sizes[part], sizes[0])


@dataclass(frozen=True)
class Held:
    """One copy of a tensor's numbers that a rank holds during a step, and between steps too where it stays."""

    row: LedgerRow
    bytes: float
    place: Place = "card"
    stays: bool = True


@dataclass(frozen=True)
class Placement:
    tensor: Tensor
    trained: bool
    region: Region
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Rules:
    """How one rank's tensors are placed. Formats are bytes per element; 0 means that there is no such copy.

    cut: `whole` on every rank; `rows` of the first dimension (FSDP2); `even`, all tensors in one flat buffer (DeepSpeed).
    """

    cut: Literal["whole", "rows", "even"] = "whole"
    parts: int = 1
    part: int = 0
    # formats
    weight: float = 2
    master: float = 0
    gradient: float = 4
    states: float = 8
    count: float = 0  # bytes per tensor beside the states
    in_blocks: bool = False  # states in eight bits with scales (spec/optimizers/blocks.py), whatever `states` says
    pads_gradients: bool = True  # gradients by rows have the shards' padding
    frozen: float = 2
    frozen_outside: float = 2  # embedding and head
    # what is cut, where `cut` is not whole
    cut_weights: bool = False  # between a step's uses of them, not only between steps
    cut_gradients: bool = False
    extra_gradients: float = 0  # bytes per element of a second, whole copy until the update
    gradients_stay: bool = False
    # where
    weights_in: Place = "card"
    masters_in: Place = "card"
    states_in: Place = "card"
    gradients_in: tuple[Place, ...] = ("card",)
    leaving: float = 0  # bytes per element of gradients on the card that are on their way to the host

    def place(self, tensor: Tensor, trained: bool = True, quantized: bool = False) -> Placement:
        """Return a tensor's placement on this rank; `quantized`: it is held in nf4."""
        if not trained and self.cut != "even":
            return self._frozen(tensor, quantized)
        if not trained:
            size = self.frozen_outside if tensor.kind in ("embedding", "head") else self.frozen
            parts = self.parts if self.cut_weights else 1
            held = (Held("weights", size * tensor.parameters / parts, self.weights_in),)
            return Placement(tensor, False, Region(0, tensor.shape[0], tensor.shape[0]), held)
        if self.cut == "rows":
            where = region(tensor.shape[0], self.parts, self.part)
            return Placement(tensor, True, where, self._by_rows(tensor, where))
        where = Region(0, tensor.shape[0], tensor.shape[0])
        return Placement(tensor, True, where, self._whole(tensor) if self.cut == "whole" else self._evenly(tensor))

    def _frozen(self, tensor: Tensor, quantized: bool) -> Placement:
        """Weights alone, cut by rows where trained weights are cut between uses; the scales of nf4 are whole."""
        where = region(tensor.shape[0], self.parts if self.cut == "rows" and self.cut_weights else 1, 0)
        if quantized:
            row, scales = nf4_bytes(tensor)
            size: float = where.stored * row + scales
        else:
            row_size = self.frozen_outside if tensor.kind in ("embedding", "head") else self.frozen
            size = row_size * where.stored * (tensor.parameters // tensor.shape[0])
        return Placement(tensor, False, where, (Held("weights", size, self.weights_in),))

    def _whole(self, tensor: Tensor) -> tuple[Held, ...]:
        n = tensor.parameters
        master = self.master if self.masters_in == "card" else max(self.master, 4)  # the host's optimizer wants fp32
        return (
            Held("weights", self.weight * n, self.weights_in),
            Held("master", master * n, self.masters_in),
            Held("optimizer", self._states(tensor, tensor.shape[0]), self.states_in),
            *(Held("gradients", self.gradient * n, place, self.gradients_stay) for place in self.gradients_in),
        )

    def _states(self, tensor: Tensor, rows: int) -> float:
        if self.in_blocks:
            return 2 * moment_bytes(tensor.shape, rows) + self.count
        return self.states * rows * (tensor.parameters // tensor.shape[0]) + self.count

    def _by_rows(self, tensor: Tensor, where: Region) -> tuple[Held, ...]:
        """Shards are stored in the master's format; weights are gathered for a step unless each use gathers them."""
        row = tensor.parameters // tensor.shape[0]
        stored = where.stored * row
        shard: LedgerRow = "master" if self.master else "weights"
        held = [Held(shard, (self.master or self.weight) * stored, self.masters_in)]
        if where.rows:
            held.append(Held("optimizer", self._states(tensor, where.rows), self.states_in))
        if not self.cut_weights:  # a gather writes every shard's padding too
            held.append(Held("weights", self.weight * stored * self.parts, stays=False))
        shard_gradients = stored if self.pads_gradients else where.rows * row
        elements = shard_gradients if self.cut_gradients else tensor.parameters
        places = self.gradients_in if self.cut_gradients else ("card", *self.gradients_in)
        held += [
            Held("gradients", self.gradient * (stored if place == "host" else elements), place, stays=False)
            for place in dict.fromkeys(places)
        ]
        return tuple(held)

    def _evenly(self, tensor: Tensor) -> tuple[Held, ...]:
        """An estimate: DeepSpeed's flat shards are padded and aligned by a little."""
        whole, part = tensor.parameters, tensor.parameters / self.parts
        gradient = part if self.cut_gradients else whole
        held = [
            Held("weights", self.weight * (part if self.cut_weights else whole), self.weights_in),
            Held("master", self.master * part, self.masters_in),
            Held("optimizer", self.states * part, self.states_in),
        ]
        for place in self.gradients_in:
            size = self.gradient * gradient if place == "card" else 4 * part
            held.append(Held("gradients", size, place, self.gradients_stay))
        passing = self.extra_gradients * whole + self.leaving * part
        return (*held, Held("gradients", passing, stays=False))
