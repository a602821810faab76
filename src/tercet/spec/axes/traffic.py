"""What travels between ranks, as plans count it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """`count` calls per optimizer step that together carry `payload` bytes: gathered, or before their reduction.

    `what` travels: weights and gradients wait for nobody's arithmetic; activations are what the next matmul reads, and
    counts of experts what the step ends with.
    """

    kind: str
    what: str
    count: int
    payload: float

    @property
    def can_hide(self) -> bool:
        """Whether arithmetic can go on meanwhile."""
        return self.what in ("weights", "gradients")
