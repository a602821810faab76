"""Model: what a model is made of, without torch. Parameters, FLOPs and bytes are sums over its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol

from tercet.spec.patterns import names

if TYPE_CHECKING:
    from tercet.spec.adapter import Adapter
    from tercet.spec.blocks.cost import Kept, Matmul
    from tercet.spec.blocks.mtp import MTP


@dataclass(frozen=True)
class Tensor:
    """One tensor, under the name that it has in memory (as transformers 5 names it).

    `axes` names each dimension (width, vocabulary, heads, ffn, experts, …); `kind` decides weight decay,
    adapter targets and splits: embedding, head, matrix, norm, bias, router, expert, adapter; balance for buffers.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    stored: str | None = None  # the name on disk, where that is another one

    @property
    def parameters(self) -> int:
        return prod(self.shape)


class Block(Protocol):
    """What attention and feed-forward descriptions share. `prefix` ends with a dot.

    Blocks with experts also have `buffers(prefix, width)` (stored, no gradient) and `idle_parameters(width)`.
    """

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]: ...

    def flops(self, width: int, tokens: int, context: float) -> int:
        """Return the forward FLOPs of `tokens` tokens that each attend to `context` tokens on average."""
        ...

    def matmuls(self, width: int) -> tuple[Matmul, ...]: ...

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """Return what a token keeps for backward; `grouped`: experts run as one matmul (on a card)."""
        ...


class AttentionBlock(Block, Protocol):
    @property
    def heads(self) -> int: ...

    @property
    def rotary_dim(self) -> int: ...

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Return the numbers of a token's queries and of its values, over all heads."""
        ...


class FeedForwardBlock(Block, Protocol):
    @property
    def ffn(self) -> int: ...


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `scaling` keeps the config's own scaling section (rope_type, factor, …) as sorted pairs."""

    theta: float = 10_000.0
    scaling: tuple[tuple[str, float | str | int | bool], ...] = ()

    def get(self, key: str, default: float | str | None = None):
        """Return one value of the scaling section; a missing or null key gives `default`."""
        value = dict(self.scaling).get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a value that must be a number. Raises ValueError where it is not, and nothing stands in for it."""
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise ValueError(f"rope_scaling: {key} is {value!r}, not a number")
        return value

    @property
    def kind(self) -> str:
        """default, linear, dynamic, llama3 or yarn."""
        return str(self.get("rope_type", "default"))


@dataclass(frozen=True)
class Balance:
    """How a mixture of experts is kept balanced while training; 0 switches a term off.

    bias_speed: step of the gate's bias per optimizer step (V3's aux-loss-free way, arXiv 2408.15664).
    sequence_loss: weight of the balance loss taken within each document (V2 and V3).
    batch_loss: weight of the classic auxiliary loss over all tokens of a step (Switch, arXiv 2101.03961).
    """

    bias_speed: float = 0.0
    sequence_loss: float = 0.0
    batch_loss: float = 0.0


@dataclass(frozen=True)
class Layer:
    attention: AttentionBlock
    feedforward: FeedForwardBlock

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return (
            *self.attention.tensors(f"{prefix}self_attn.", width),
            *self.feedforward.tensors(f"{prefix}mlp.", width),
            Tensor(f"{prefix}input_layernorm.weight", (width,), ("width",), "norm"),
            Tensor(f"{prefix}post_attention_layernorm.weight", (width,), ("width",), "norm"),
        )

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return (*self.attention.matmuls(width), *self.feedforward.matmuls(width))

    def entries(self, width: int) -> int:
        """Return the numbers per token that come in; full recomputation keeps these alone."""
        return width

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """Return what both blocks keep, and the rows that the layer's own two norms read."""
        from tercet.spec.blocks.cost import Kept

        norms = Kept(0, 2 * width, 0, 2, 0)
        return self.attention.kept(width, grouped) + self.feedforward.kept(width, grouped) + norms

    def buffers(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        own = getattr(self.feedforward, "buffers", None)
        return own(f"{prefix}mlp.", width) if own else ()

    def idle_parameters(self, width: int) -> int:
        """Return the parameters that a token does not visit: those of the experts it is not sent to."""
        own = getattr(self.feedforward, "idle_parameters", None)
        return own(width) if own else 0

    def flops(self, width: int, tokens: int, context: float) -> int:
        return self.attention.flops(width, tokens, context) + self.feedforward.flops(width, tokens, context)


@dataclass(frozen=True)
class Model:
    """A decoder. `layers` may differ from one another (dense first layers of a mixture of experts).

    `mtp` holds one block (spec/blocks/mtp.py) per further token that is predicted; these follow the layers
    in numbering, as the published files have them.
    """

    module: ClassVar[str] = "tercet"  # whose module computes it

    family: str
    vocabulary: int
    width: int
    layers: tuple[Layer, ...]
    tied: bool = False
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    context_tokens: int = 2048
    init_std: float = 0.02
    name: str = ""
    mtp: tuple[MTP, ...] = ()
    balance: Balance = field(default_factory=Balance)
    frozen: bool = False  # only adapters are trained (spec/adapter.py)
    adapter: Adapter | None = None  # as a recipe asks for it, its modules by their whole names
    freeze: tuple[str, ...] = ()  # patterns of what is not trained (spec/trained.py)
    unread: tuple[str, ...] = ()  # names in the files that are no parameters: masks, tables, a tied head's copy

    def blocks(self) -> Iterator[tuple[str, Layer | MTP]]:
        """Yield (prefix, layer) for every layer and every further prediction, in the order of the module."""
        for n, block in enumerate((*self.layers, *self.mtp)):
            yield f"model.layers.{n}.", block

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every parameter once, in the order in which the built module holds them."""
        w, v = self.width, self.vocabulary
        found = [Tensor("model.embed_tokens.weight", (v, w), ("vocabulary", "width"), "embedding")]
        for prefix, block in self.blocks():
            found += block.tensors(prefix, w)
        found.append(Tensor("model.norm.weight", (w,), ("width",), "norm"))
        if not self.tied:
            found.append(Tensor("lm_head.weight", (v, w), ("vocabulary", "width"), "head"))
        return tuple(found)

    def buffers(self) -> tuple[Tensor, ...]:
        """Return what is stored with the weights but trained by no gradient (balancing biases); always fp32."""
        found: list[Tensor] = []
        for prefix, block in self.blocks():
            found += block.buffers(prefix, self.width)
        return tuple(found)

    def trains(self, tensor: Tensor) -> bool:
        """Whether a tensor gets gradients."""
        if self.frozen and tensor.kind != "adapter":
            saved = self.adapter.modules_to_save if self.adapter else ()
            if tensor.name.rpartition(".")[0] not in saved:
                return False
        return not any(names(tensor.name, pattern) for pattern in self.freeze)

    def quantizes(self, tensor: Tensor) -> bool:
        """Whether a tensor is held in nf4."""
        return self.quantized and tensor.kind == "matrix"

    @property
    def quantized(self) -> bool:
        return self.adapter is not None and self.adapter.quantize != "none"

    @property
    def trains_some(self) -> bool:
        """Whether some tensors are frozen."""
        return self.frozen or bool(self.freeze)

    @property
    def trained_parameters(self) -> int:
        return sum(t.parameters for t in self.tensors() if self.trains(t))

    def without_mtp(self) -> Model:
        """Return the model as it is served: next-token prediction only."""
        return replace(self, mtp=())

    @property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.tensors())

    @property
    def idle_parameters(self) -> int:
        return sum(block.idle_parameters(self.width) for _, block in self.blocks())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token makes use of: all but the experts it is not sent to (table and head whole)."""
        return self.parameters - self.idle_parameters

    def flops(self, tokens: int, context: float) -> int:
        """Return the forward FLOPs of `tokens` tokens, each attending to `context` on average, heads included."""
        blocks = sum(block.flops(self.width, tokens, context) for _, block in self.blocks())
        return blocks + 2 * tokens * self.width * self.vocabulary * (1 + len(self.mtp))
