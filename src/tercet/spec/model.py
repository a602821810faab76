"""Model: what a model is made of, without torch. Parameters, FLOPs and bytes are sums over its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Protocol


@dataclass(frozen=True)
class Tensor:
    """One parameter, under the name that it has in memory (as transformers 5 names it).

    `axes` names each dimension (width, vocabulary, heads, ffn, experts, …); `kind` decides weight decay,
    adapter targets and splits: embedding, head, matrix, norm, bias, router, expert.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str

    @property
    def parameters(self) -> int:
        return prod(self.shape)


class Block(Protocol):
    """What attention and feed-forward descriptions share. `prefix` ends with a dot."""

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]: ...

    def flops(self, width: int, tokens: int, context: float) -> int:
        """Return the forward FLOPs of `tokens` tokens that each attend to `context` tokens on average."""
        ...


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `scaling` keeps the config's own scaling section (type, factor, …) as sorted pairs."""

    theta: float = 10_000.0
    scaling: tuple[tuple[str, float | str | int | bool], ...] = ()


@dataclass(frozen=True)
class Layer:
    attention: Block
    feedforward: Block


@dataclass(frozen=True)
class Model:
    """A decoder. `layers` may differ from one another (dense first layers of a mixture of experts)."""

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

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every parameter once, in the order in which the built module holds them."""
        w, v = self.width, self.vocabulary
        found = [Tensor("model.embed_tokens.weight", (v, w), ("vocabulary", "width"), "embedding")]
        for n, layer in enumerate(self.layers):
            found += self.layer_tensors(f"model.layers.{n}.", layer)
        found.append(Tensor("model.norm.weight", (w,), ("width",), "norm"))
        if not self.tied:
            found.append(Tensor("lm_head.weight", (v, w), ("vocabulary", "width"), "head"))
        return tuple(found)

    def layer_tensors(self, prefix: str, layer: Layer) -> list[Tensor]:
        w = self.width
        return [
            *layer.attention.tensors(f"{prefix}self_attn.", w),
            *layer.feedforward.tensors(f"{prefix}mlp.", w),
            Tensor(f"{prefix}input_layernorm.weight", (w,), ("width",), "norm"),
            Tensor(f"{prefix}post_attention_layernorm.weight", (w,), ("width",), "norm"),
        ]

    @property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.tensors())

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: all but the embedding; a tied head counts once."""
        skipped = 0 if self.tied else self.vocabulary * self.width
        return self.parameters - skipped

    def flops(self, tokens: int, context: float) -> int:
        """Return the forward FLOPs of `tokens` tokens, each attending to `context` on average, head included."""
        blocks = sum(
            layer.attention.flops(self.width, tokens, context) + layer.feedforward.flops(self.width, tokens, context)
            for layer in self.layers
        )
        return blocks + 2 * tokens * self.width * self.vocabulary
