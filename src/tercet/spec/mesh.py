"""Mesh: the ranks as named axes. Whoever deals rows, sums or saves asks it, never the number of ranks.

| axis | its ranks |
|---|---|
| pipeline | hold different layers |
| data | are replicas: they hold the same and compute different rows |
| shard | hold different parts of each tensor and compute different rows |
| context | compute different stretches of the same rows |
| tensor | hold different parts of each tensor and compute parts of the same rows |
| expert | hold different experts; folded into data x shard, so it adds no ranks |

Ranks are numbered with pipeline slowest and tensor fastest: what sends most lies on neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

AXES = ("pipeline", "data", "shard", "context", "tensor")  # slowest first
ROWS = ("data", "shard")  # along these, ranks compute different rows: one after the other they are the data ranks
TOKENS = (*ROWS, "context")  # along these, ranks compute different tokens: sums of losses and counts go over them
SAME_TOKENS = ("pipeline", "tensor")  # along these, ranks compute parts of what happens to the same tokens


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def size(self, axes: Iterable[str] = AXES) -> int:
        return prod(getattr(self, axis) for axis in axes)

    @property
    def ranks(self) -> int:
        return self.size()

    @property
    def data_ranks(self) -> int:
        """Ranks that compute different rows; accumulation and padding rows follow from it."""
        return self.size(ROWS)

    def position(self, rank: int) -> dict[str, int]:
        """Return where a rank stands on each axis. Expert ranks are neighbours among the data ranks."""
        found, rest = {}, rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, getattr(self, axis))
        found["expert"] = (found["data"] * self.shard + found["shard"]) % self.expert
        return found

    def data_rank(self, rank: int) -> int:
        """Return which of the `data_ranks` shares of a batch a rank computes; ranks that share rows have one number."""
        return self.index(rank, ROWS)

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Return a rank's number among those that differ from it along these axes alone, the last axis fastest."""
        at, number = self.position(rank), 0
        for axis in axes:
            number = number * getattr(self, axis) + at[axis]
        return number

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ along `axes` alone, each ascending; together they are all ranks.

        `expert` stands alone: its groups are neighbouring data ranks. Raises ValueError when it does not divide them.
        """
        axes = tuple(axes)
        if axes == ("expert",):
            return self._expert_groups()
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            at = self.position(rank)
            found.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        return [tuple(group) for group in found.values()]

    def _expert_groups(self) -> list[tuple[int, ...]]:
        if self.data_ranks % self.expert:
            raise ValueError(f"{self.expert} expert ranks do not divide {self.data_ranks} data ranks")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            at = self.position(rank)
            key = (at["pipeline"], at["context"], at["tensor"], self.data_rank(rank) // self.expert)
            found.setdefault(key, []).append(rank)
        return [tuple(group) for group in found.values()]
