"""Sums over a model that every strategy needs, made once per plan: nothing walks all the tensors again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tercet.spec.axes import expert
from tercet.spec.axes.data import buckets
from tercet.spec.axes.host import Sizes
from tercet.spec.axes.split import chunk
from tercet.spec.axes.traffic import Collective
from tercet.spec.blocks.cost import Kept, Matmul
from tercet.spec.blocks.mtp import MTP
from tercet.spec.model import Layer, Model, Tensor
from tercet.spec.placement import LedgerRow, Place, Rules


@dataclass(frozen=True)
class LayerKind:
    """A layer or a further prediction, and how many of the model's are exactly like it."""

    layer: Layer | MTP
    numbers: tuple[int, ...]  # which blocks of the model these are, further predictions last
    matmuls: tuple[Matmul, ...]
    attention: Kept
    feedforward: Kept
    whole: Kept  # both, and what lies around them
    looped: Kept  # the same where experts run one after the other, as on a CPU
    entries: int  # numbers per token that come in
    score_width: int  # numbers of one token's queries, over all heads
    value_width: int
    window: int | None
    parameters: int
    tensors: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        return len(self.numbers)


class Counts:
    """Model -> the sums that ledger and clock use. Bytes and FLOPs are not here: they depend on the strategy."""

    def __init__(self, model: Model):
        self.model = model
        self.kinds = [self._kind(layer, n) for layer, n in _grouped((*model.layers, *model.mtp))]
        self._buckets: dict[float, int] = {}
        self._padded: dict[int, int] = {}
        self._placed: dict[Rules, dict[tuple[LedgerRow, Place, bool], float]] = {}
        self.blocks = len(model.layers) + len(model.mtp)

    def _kind(self, layer: Layer | MTP, numbers: tuple[int, ...]) -> LayerKind:
        width = self.model.width
        score, value = layer.attention.attention_widths
        tensors = layer.tensors("", width)
        return LayerKind(
            layer=layer,
            numbers=numbers,
            matmuls=layer.matmuls(width),
            attention=layer.attention.kept(width),
            feedforward=layer.feedforward.kept(width),
            whole=layer.kept(width),
            looped=layer.kept(width, grouped=False),
            entries=layer.entries(width),
            score_width=score,
            value_width=value,
            window=getattr(layer.attention, "window", None),
            parameters=sum(t.parameters for t in tensors),
            tensors=tensors,
        )

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, int], ...]:
        """Return (tensor, how often): the layers' tensors once per kind, then those outside the layers.

        A tensor of several layers has the name that it has within one. Where names decide what is frozen, each
        tensor stands by itself.
        """
        if self.model.freeze or (self.model.adapter and self.model.adapter.modules_to_save):
            return tuple((t, 1) for t in self.model.tensors())
        inside = [(t, k.count) for k in self.kinds for t in k.tensors]
        return (*inside, *((t, 1) for t in self.outside))

    def treatment(self, tensor: Tensor) -> tuple[bool, bool]:
        """Return whether a tensor is trained, and whether it is held in nf4."""
        return self.model.trains(tensor), self.model.quantizes(tensor)

    @property
    def quantized(self) -> bool:
        return self.model.quantized

    @cached_property
    def entries(self) -> int:
        """Return the numbers per token that go into all blocks."""
        return sum(k.entries * k.count for k in self.kinds)

    @cached_property
    def outside(self) -> tuple[Tensor, ...]:
        """Embedding, final norm, head: what no layer and no further prediction holds."""
        prefixes = tuple(prefix for prefix, _ in self.model.blocks())
        return tuple(t for t in self.model.tensors() if not t.name.startswith(prefixes))

    @cached_property
    def expert_traffic(self) -> tuple[Collective, ...]:
        """Return what experts send in a step, whatever the strategy."""
        return tuple(expert.traffic(self.model))

    @cached_property
    def host_sizes(self) -> Sizes:
        """Return the buffers in which weights travel that live in host memory."""
        return Sizes.of(self.model)

    @cached_property
    def parameters(self) -> int:
        return sum(t.parameters * n for t, n in self.tensors)

    @cached_property
    def trained_parameters(self) -> int:
        """Return the parameters that get gradients."""
        return sum(t.parameters * n for t, n in self.tensors if self.model.trains(t))

    @cached_property
    def outside_parameters(self) -> int:
        return sum(t.parameters for t in self.outside)

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
        return sum(chunk(t.shape[0], ranks)[rank] * (t.parameters // t.shape[0]) * n for t, n in self.tensors)

    def padded(self, ranks: int) -> int:
        """Return the elements that every rank stores: shards are padded to the first rank's size."""
        if ranks not in self._padded:
            rows = ((chunk(t.shape[0], ranks)[0], t.parameters // t.shape[0], n) for t, n in self.tensors)
            self._padded[ranks] = sum(held * row * n for held, row, n in rows)
        return self._padded[ranks]

    def placed(self, rules: Rules) -> dict[tuple[LedgerRow, Place, bool], float]:
        """Return the bytes that a rank places, by (row, place, whether they stay between steps); summed once per rules."""
        if rules not in self._placed:
            found: dict[tuple[LedgerRow, Place, bool], float] = {}
            for tensor, n in self.tensors:
                for held in rules.place(tensor, *self.treatment(tensor)).held:
                    key = held.row, held.place, held.stays
                    found[key] = found.get(key, 0.0) + n * held.bytes
            self._placed[rules] = found
        return self._placed[rules]

    def held_tensors(self, ranks: int, rank: int) -> int:
        """Return of how many tensors a rank holds at least one row."""
        return sum(n for t, n in self.tensors if chunk(t.shape[0], ranks)[rank])

    def active_matmul_flops(self) -> float:
        """Return forward FLOPs of all matmuls per token, heads included, attention scores not."""
        heads = 1 + len(self.model.mtp)
        return sum(m.flops * k.count for k in self.kinds for m in k.matmuls) + 2.0 * heads * self.head_parameters

    def buckets(self, bytes_per_element: float) -> int:
        """Return into how many buckets the gradients are cut, in the order in which backward makes them."""
        if bytes_per_element not in self._buckets:
            sizes = [t.parameters for t in reversed(self.model.tensors())]
            self._buckets[bytes_per_element] = len(buckets(sizes, bytes_per_element))
        return self._buckets[bytes_per_element]


def _grouped(layers: tuple[Layer | MTP, ...]) -> list[tuple[Layer | MTP, tuple[int, ...]]]:
    found: list[tuple[Layer | MTP, tuple[int, ...]]] = []
    for number, layer in enumerate(layers):
        for n, (known, numbers) in enumerate(found):
            if known is layer or known == layer:
                found[n] = (known, (*numbers, number))
                break
        else:
            found.append((layer, (number,)))
    return found
