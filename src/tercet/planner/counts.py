"""Sums over a model that every strategy needs, made once per plan: the search must not walk the tensors again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from tercet.spec.blocks.cost import Kept, Matmul
from tercet.spec.model import Layer, Model, Tensor


@dataclass(frozen=True)
class LayerKind:
    """A layer and how many of the model's layers are exactly like it."""

    layer: Layer
    count: int
    matmuls: tuple[Matmul, ...]
    kept: tuple[Kept, Kept]  # attention, feed-forward
    score_width: int  # numbers of one token's queries, over all heads
    value_width: int
    window: int | None
    parameters: int
    tensors: tuple[Tensor, ...]


class Counts:
    """Model -> the sums that ledger and clock use. Bytes and FLOPs are not here: they depend on the strategy."""

    def __init__(self, model: Model):
        self.model = model
        self.kinds = [self._kind(layer, n) for layer, n in _grouped(model.layers)]

    def _kind(self, layer: Layer, count: int) -> LayerKind:
        model, width = self.model, self.model.width
        score, value = layer.attention.attention_widths
        tensors = tuple(model.layer_tensors("", layer))
        return LayerKind(
            layer=layer,
            count=count,
            matmuls=layer.matmuls(width),
            kept=(layer.attention.kept(width), layer.feedforward.kept(width)),
            score_width=score,
            value_width=value,
            window=getattr(layer.attention, "window", None),
            parameters=sum(t.parameters for t in tensors),
            tensors=tensors,
        )

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, int], ...]:
        """Return (tensor, how often): the layers' tensors once per kind, then those outside the layers."""
        inside = [(t, k.count) for k in self.kinds for t in k.tensors]
        return (*inside, *((t, 1) for t in self.outside))

    @cached_property
    def outside(self) -> tuple[Tensor, ...]:
        """Embedding, final norm, head, and whatever else the model adds (multi-token prediction)."""
        prefixes = tuple(prefix for prefix, _ in islice(self.model.blocks(), len(self.model.layers)))
        return tuple(t for t in self.model.tensors() if not t.name.startswith(prefixes))

    @cached_property
    def parameters(self) -> int:
        return sum(t.parameters * n for t, n in self.tensors)

    @cached_property
    def outside_parameters(self) -> int:
        return sum(t.parameters for t in self.outside)

    @cached_property
    def tensor_count(self) -> int:
        return sum(n for _, n in self.tensors)

    @cached_property
    def head_parameters(self) -> int:
        return self.model.vocabulary * self.model.width

    @cached_property
    def largest_layer(self) -> int:
        return max(k.parameters for k in self.kinds)

    @cached_property
    def largest_tensor(self) -> int:
        return max(t.parameters for t, _ in self.tensors)

    def chunk(self, ranks: int, rank: int) -> int:
        """Return the elements that a rank holds of all tensors split on their first dimension, without padding."""
        return sum(chunk_rows(t.shape[0], ranks, rank) * (t.parameters // t.shape[0]) * n for t, n in self.tensors)

    def padded(self, ranks: int) -> int:
        """Return the elements that every rank stores: shards are padded to the first rank's size."""
        return sum(chunk_rows(t.shape[0], ranks, 0) * (t.parameters // t.shape[0]) * n for t, n in self.tensors)

    def held_tensors(self, ranks: int, rank: int) -> int:
        """Return of how many tensors a rank holds at least one row."""
        return sum(n for t, n in self.tensors if chunk_rows(t.shape[0], ranks, rank))

    def active_matmul_flops(self) -> float:
        """Return forward FLOPs of all matmuls per token, head included, attention scores not."""
        return sum(m.flops * k.count for k in self.kinds for m in k.matmuls) + 2.0 * self.head_parameters


def chunk_rows(rows: int, ranks: int, rank: int) -> int:
    """Return how many rows a rank holds by PyTorch's `Shard(0)`: ceil(rows / ranks) each, later ranks fewer."""
    size = -(-rows // ranks)
    return max(0, min(rows - rank * size, size))


def _grouped(layers: tuple[Layer, ...]) -> list[tuple[Layer, int]]:
    found: list[tuple[Layer, int]] = []
    for layer in layers:
        for n, (known, count) in enumerate(found):
            if known is layer or known == layer:
                found[n] = (known, count + 1)
                break
        else:
            found.append((layer, 1))
    return found
