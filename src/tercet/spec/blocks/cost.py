"""What blocks tell the planner besides their tensors: shapes of matmuls, and what is kept for backward."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tercet.spec.model import Tensor


@dataclass(frozen=True)
class Matmul:
    """A token's row of `inner` numbers times a weight of (outer, inner); FLOPs per token: 2 * inner * outer * rows.

    `rows` is how many rows a token contributes (experts per token), `groups` over how many weights of that
    shape the rows are spread (experts). `name` is the module's, which adapters choose by; 0 means that it has none.
    """

    name: str
    inner: int
    outer: int
    rows: float = 1.0
    groups: int = 1
    adapter_rank: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.inner * self.outer * self.rows

    @property
    def weights(self) -> int:
        return self.inner * self.outer * self.groups


@dataclass(frozen=True)
class Kept:
    """Numbers per token that a block holds between forward and backward, by what they are.

    `inputs`: what its first matmuls read (the normed row). `outputs`: what its matmuls and its attention return
    and a later step needs. `products`: results of elementwise steps that a matmul reads. `stats`: words of four
    bytes whatever the format (softmax normalisers, a norm's scales; an index counts two). `widened`: numbers copied
    to fp32 where the format is another. `elementwise`: numbers read or written by fused elementwise steps of one
    forward. `selected` and `selected_stats`: what selective recomputation holds instead of all these, the results
    of the operators in spec/recompute.py.
    """

    inputs: float
    outputs: float
    products: float
    stats: float
    elementwise: float
    selected: float = 0.0
    selected_stats: float = 0.0
    widened: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def matrices(tensors: tuple[Tensor, ...], rows: float = 1.0) -> tuple[Matmul, ...]:
    """Return the matmuls of a block from its tensors; stacked experts count `rows` per token."""
    found = []
    for t in tensors:
        name = t.name.removesuffix(".weight").rpartition(".")[2]
        if t.kind in ("matrix", "router"):
            found.append(Matmul(name, t.shape[1], t.shape[0]))
        elif t.kind == "expert":
            found.append(Matmul(name, t.shape[2], t.shape[1], rows, t.shape[0]))
    return tuple(found)
