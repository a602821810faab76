"""Low-rank adapters, described: a model -> the same model frozen, with two small matrices beside each adapted one.

LoRA, arXiv 2106.09685: the result of an adapted matmul is W x + (alpha / rank) B A x; only A and B are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tercet.spec.blocks.cost import Kept, Matmul
from tercet.spec.model import Layer, Model, Tensor

if TYPE_CHECKING:
    from tercet.spec.recipe import AdapterSection


@dataclass(frozen=True)
class AdaptedLayer(Layer):
    """A layer whose matrices with a name of `targets` have adapters of `rank`."""

    base: Layer
    rank: int
    targets: tuple[str, ...]

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return (*self.base.tensors(prefix, width), *self._adapters(prefix, width))

    def _adapters(self, prefix: str, width: int) -> Iterator[Tensor]:
        for t in self.base.tensors(prefix, width):
            if t.kind not in ("matrix", "router", "expert") or not targeted(t.name, self.targets):
                continue
            *stack, outer, inner = t.shape
            *names, outer_axis, inner_axis = t.axes
            name = t.name.removesuffix(".weight")
            yield Tensor(f"{name}.lora_A.weight", (*stack, self.rank, inner), (*names, "rank", inner_axis), "adapter")
            yield Tensor(f"{name}.lora_B.weight", (*stack, outer, self.rank), (*names, outer_axis, "rank"), "adapter")

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return tuple(
            replace(m, adapter_rank=self.rank) if targeted(m.name, self.targets) else m
            for m in self.base.matmuls(width)
        )

    def kept(self, width: int, grouped: bool = True) -> Kept:
        return self.base.kept(width, grouped)


def targeted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether a matrix is adapted, by the last word of its name: q_proj is, and so is q_proj_b of q_proj."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    return any(last == t or last.startswith(f"{t}_") for t in targets)


def adaptable(model: Model, words: list[str] | str) -> tuple[str, ...]:
    """Return the names of matrices that adapter.targets means; all-linear: each of every layer but the routers."""
    if words != "all-linear":
        return (words,) if isinstance(words, str) else tuple(words)
    layers = {*model.layers, *(block.layer for block in model.mtp)}
    tensors = (t for layer in layers for t in layer.tensors("", model.width) if t.kind in ("matrix", "expert"))
    return tuple(sorted({t.name.removesuffix(".weight").rpartition(".")[2] for t in tensors}))


def with_adapter(model: Model, section: AdapterSection) -> Model:
    """Return the model as a recipe trains it: itself, or frozen with the section's adapters."""
    return model if section.kind == "none" else adapted(model, section.rank, adaptable(model, section.targets))


def adapted(model: Model, rank: int, targets: tuple[str, ...]) -> Model:
    """Return the model with all its own tensors frozen and adapters on every layer's matrices of these names."""

    def with_adapters(layer: Layer) -> Layer:
        return AdaptedLayer(layer.attention, layer.feedforward, layer, rank, targets)

    return replace(
        model,
        frozen=True,
        layers=tuple(with_adapters(layer) for layer in model.layers),
        mtp=tuple(replace(block, layer=with_adapters(block.layer)) for block in model.mtp),
    )
