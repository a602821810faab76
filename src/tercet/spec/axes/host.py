"""Weights in host memory, described: what comes and goes together, and what crosses each card's link.

Twin of parallel/host.py. Tensors travel in groups, each one flat buffer: the embedding, every block, and the end (final
norm, head, further predictions). Whatever the number of micro-batches, a step fetches each block twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet.spec.model import Model, Tensor

if TYPE_CHECKING:
    from tercet.spec.counts import Counts

BEGIN = -1  # the embedding's number among the groups; blocks are 0, 1, …; the end comes after the last block
ALIGNED = 128  # elements; where a tensor begins in its group's buffer, so that kernels may read it in vectors


def groups(model: Model) -> list[tuple[Tensor, ...]]:
    """Return the tensors that travel together, in forward order: embedding, blocks, end."""
    names = [prefix for prefix, _ in model.blocks()][: len(model.layers)]
    found: list[list[Tensor]] = [[] for _ in range(len(names) + 2)]
    number = {prefix: n + 1 for n, prefix in enumerate(names)}
    for tensor in model.tensors():
        block = next((n for prefix, n in number.items() if tensor.name.startswith(prefix)), None)
        found[block or (0 if tensor.kind == "embedding" else -1)].append(tensor)
    return [tuple(group) for group in found]


def places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return (where each tensor begins in its group's buffer, the buffer's length), in elements."""
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.parameters // ALIGNED) * ALIGNED
    return begins, end


def ends_with_embedding(model: Model) -> bool:
    """Whether the end needs the embedding's weight too: as its head, or to embed what is predicted further."""
    return model.tied or bool(model.mtp)


@dataclass(frozen=True)
class Sizes:
    """Elements of the groups' buffers."""

    begin: int
    blocks: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        begin, *blocks, end = (places(group)[1] for group in groups(model))
        return cls(begin, tuple(blocks), end)

    @property
    def whole(self) -> int:
        return self.begin + sum(self.blocks) + self.end

    @property
    def largest(self) -> int:
        return max(self.begin, self.end, *self.blocks)


@dataclass(frozen=True)
class Crossing:
    """Bytes over one card's link in one optimizer step."""

    weights: float  # to the card
    inputs: float  # of blocks: to the host in forward, and back in backward
    gradients: float  # to the host

    @property
    def to_card(self) -> float:
        return self.weights + self.inputs

    @property
    def to_host(self) -> float:
        return self.gradients + self.inputs


def traffic(counts: Counts, tokens: int, weight_bytes: float, activation_bytes: float) -> Crossing:
    """Return what crosses one card's link. `tokens`: of all micro-batches of this card.

    Weights: blocks twice, embedding and end once, and the embedding once more where the end needs it. Gradients: fp32,
    once. Batches (three integers per token) are not counted.
    """
    model, sizes = counts.model, counts.host_sizes
    again = sizes.begin if ends_with_embedding(model) else 0
    weights = weight_bytes * (2 * sum(sizes.blocks) + sizes.begin + sizes.end + again)
    inputs = activation_bytes * tokens * model.width * len(model.layers)
    return Crossing(weights, inputs, 4.0 * sizes.whole)
