"""Low-rank adapters, described: a model -> the same model frozen, with two small matrices beside each adapted one.

LoRA, arXiv 2106.09685: the result of an adapted matmul is W x + (alpha / rank) B A x; only A and B are trained.
Twin: model/adapter.py, which builds them from peft's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from tercet.errors import InputError, nearest
from tercet.spec.blocks.cost import Kept, Matmul
from tercet.spec.model import Balance, Layer, Model, Tensor
from tercet.spec.patterns import fits

ALL_LINEAR = "all-linear"
NF4_BLOCK, NF4_OUTER_BLOCK = 64, 256  # values that share a scale, and scales that share one (arXiv 2305.14314)


@dataclass(frozen=True)
class Adapter:
    """`targets` and `modules_to_save` are what was asked for: names or patterns (see `matched`)."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = (ALL_LINEAR,)
    modules_to_save: tuple[str, ...] = ()  # trained whole beside the adapters
    quantize: str = "none"

    @property
    def scaling(self) -> float:
        """The factor before B A; rsLoRA (arXiv 2312.03732) divides by the root of the rank."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class AdaptedLayer(Layer):
    """A layer whose matrices named in `targets` have adapters of `rank`.

    A target is a matrix's whole name within the layer (self_attn.q_proj), or its last word alone (q_proj): then it
    means experts and the router too, as hand-written systems have it.
    """

    base: Layer
    rank: int
    targets: tuple[str, ...]

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return (*self.base.tensors(prefix, width), *self._adapters(prefix, width))

    def _adapters(self, prefix: str, width: int) -> Iterator[Tensor]:
        for t in self.base.tensors(prefix, width):
            name = module_of(t)
            within = name.removeprefix(prefix)
            if t.kind not in ("matrix", "router", "expert"):
                continue
            if within not in self.targets and not targeted(within, self.targets):
                continue
            *stack, outer, inner = t.shape
            *names, outer_axis, inner_axis = t.axes
            yield Tensor(f"{name}.lora_A.weight", (*stack, self.rank, inner), (*names, "rank", inner_axis), "adapter")
            yield Tensor(f"{name}.lora_B.weight", (*stack, outer, self.rank), (*names, outer_axis, "rank"), "adapter")

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        whole = {t.rpartition(".")[2] for t in self.targets if "." in t}
        return tuple(
            replace(m, adapter_rank=self.rank)
            if targeted(m.name, self.targets) or (m.groups == 1 and m.name in whole)
            else m
            for m in self.base.matmuls(width)
        )

    def kept(self, width: int, grouped: bool = True) -> Kept:
        return self.base.kept(width, grouped)


def targeted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether a matrix is adapted, by the last word of its name: q_proj is, and so is q_proj_b of q_proj."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    return any(last == t or last.startswith(f"{t}_") for t in targets)


# ----------------------------------------------------------------------------------------- what a recipe asks for


def with_adapter(model: Model, adapter: Adapter) -> Model:
    """Return the model as it is trained with an adapter: frozen but for what the patterns name.

    Further predictions are left out and experts are not balanced: both would train what is frozen. Raises InputError
    for a pattern that matches nothing, and for what has no adapters.
    """
    if model.module != "tercet":
        raise InputError("adapter: lora is not built for model.module=transformers", "Leave model.module out.")
    model = replace(model.without_mtp(), balance=Balance())
    names = {name for found in matched(model, adapter).values() for name in found}
    layers = []
    for prefix, layer in model.blocks():
        own = tuple(sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix)))
        assert isinstance(layer, Layer)
        layers.append(AdaptedLayer(layer.attention, layer.feedforward, layer, adapter.rank, own) if own else layer)
    if adapter.quantize == "nf4":
        _check_nf4(model)
    saved = tuple(name for found in saved_modules(model, adapter).values() for name in found)
    return replace(model, frozen=True, layers=tuple(layers), adapter=replace(adapter, modules_to_save=saved))


def matched(model: Model, adapter: Adapter) -> dict[str, list[str]]:
    """Return target -> names of the modules that it matches.

    A target is the end of a name (q_proj, self_attn.q_proj), a pattern of a whole one (model.layers.[0-7].*_proj), or
    all-linear: every matrix of the layers. Raises InputError for one that matches none, listing what is there.
    """
    there = [module_of(t) for t in _inside(model) if t.kind == "matrix"]
    found = {}
    for target in adapter.targets:
        found[target] = there if target == ALL_LINEAR else [name for name in there if fits(name, target)]
        if not found[target]:
            _refuse_target(model, target, there)
    return found


def saved_modules(model: Model, adapter: Adapter) -> dict[str, list[str]]:
    """Return each of `modules_to_save` -> the modules that it matches; embedding, head and norms may be named."""
    there = list(dict.fromkeys(module_of(t) for t in model.tensors() if t.kind in ("embedding", "head", "norm")))
    found = {word: [name for name in there if fits(name, word)] for word in adapter.modules_to_save}
    for word, names in found.items():
        if not names:
            ends = sorted({name.rpartition(".")[2] for name in there})
            raise InputError(
                f"adapter.modules_to_save: {word!r} matches nothing{nearest(word, ends)}",
                f"What may be trained beside adapters: {', '.join(ends)}.",
            )
        if model.tied and "model.embed_tokens" in names:
            raise InputError(
                f"adapter.modules_to_save: {word!r}: this model's head is its embedding, and peft's format has no "
                "place for a pair that is trained together",
                "Leave it out, or train the whole model: adapter=none.",
            )
    return found


def describe_adapter(model: Model) -> list[str]:
    """Return what is trained and beside which matrices, a line each: the table of what the targets matched."""
    adapter = model.adapter
    assert adapter is not None
    end, by_end = ".lora_A.weight", {}
    for t in model.tensors():
        if t.kind == "adapter" and t.name.endswith(end):
            last = t.name.removesuffix(end).rpartition(".")[2]
            by_end[last] = by_end.get(last, 0) + 1
    trained, whole = model.trained_parameters, sum(t.parameters for t in model.tensors() if t.kind != "adapter")
    base = "frozen, the layers' matrices in nf4" if model.quantized else "frozen"
    lines = [
        f"adapter: LoRA of rank {adapter.rank}, scale {adapter.scaling:g}; {trained:,} parameters are trained, "
        f"{trained / whole:.2%} of the {whole:,} of the model, which is {base}",
        "adapter: beside " + ", ".join(f"{name} ({n})" for name, n in by_end.items()),
    ]
    if adapter.modules_to_save:
        lines.append("adapter: trained whole: " + ", ".join(adapter.modules_to_save))
    if any(t.kind == "expert" for t in model.tensors()):
        lines.append("adapter: experts and router stay as they are, and are not balanced")
    return lines


def module_of(tensor: Tensor) -> str:
    """Return the name of the module that holds a tensor, or of a stacked expert's tensor its own."""
    return tensor.name.removesuffix(".weight").removesuffix(".bias")


def _inside(model: Model) -> list[Tensor]:
    return [t for prefix, layer in model.blocks() for t in layer.tensors(prefix, model.width)]


def _refuse_target(model: Model, target: str, there: list[str]) -> None:
    others = {"expert": "experts", "router": "the router", "embedding": "the embedding", "head": "the head"}
    for t in model.tensors():
        name = module_of(t)
        if t.kind in others and (fits(name, target) or target in name.split(".")):
            raise InputError(
                f"adapter.targets: {target!r} names {name}: {others[t.kind]} get no adapters here",
                "Adapters go beside attention, dense feed-forward and shared experts: adapter.targets=all-linear.",
            )
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in there))
    raise InputError(
        f"adapter.targets: {target!r} matches no matrix of this model{nearest(target, ends)}",
        f"There are: {', '.join(ends)} (in {there[0].rpartition('.')[0]} and so on), or all-linear.",
    )


# ----------------------------------------------------------------------------------------------------------- nf4


def _check_nf4(model: Model) -> None:
    for t in _inside(model):
        if t.kind == "expert":
            raise InputError(
                f"adapter.quantize is nf4, but {t.name} and the like are stacked experts, which are not quantised here",
                "Use adapter.quantize=none, or a model without experts.",
            )
        if t.kind == "matrix" and t.shape[1] % 4:
            raise InputError(
                f"adapter.quantize is nf4, but {t.name} has rows of {t.shape[1]} numbers, which four does not divide"
            )


def nf4_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of (one row's packed values, the whole tensor's scales) in nf4 with doubly quantised scales."""
    scales = ceil(tensor.parameters / NF4_BLOCK)
    return tensor.shape[1] // 2, scales + 4 * ceil(scales / NF4_OUTER_BLOCK) + 4
