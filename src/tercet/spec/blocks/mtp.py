"""Multi-token prediction: one more layer per further token, DeepSeek-V3, arXiv 2412.19437, section 2.2.

Twin of model/mtp.py. Depth k joins the state of depth k - 1 with the embedding of the token k ahead
(norms enorm and hnorm, projection eh_proj), runs one decoder layer and predicts with the shared head.
Embedding and head are the main model's; the published files hold copies of them, which `stored` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.blocks.cost import Kept, Matmul, matrices
from tercet.spec.model import AttentionBlock, FeedForwardBlock, Layer, Tensor


@dataclass(frozen=True)
class MTP:
    layer: Layer

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return (
            Tensor(f"{prefix}enorm.weight", (width,), ("width",), "norm"),
            Tensor(f"{prefix}hnorm.weight", (width,), ("width",), "norm"),
            Tensor(f"{prefix}eh_proj.weight", (width, 2 * width), ("width", "two_widths"), "matrix"),
            *self.layer.tensors(prefix, width),
            Tensor(f"{prefix}shared_head.norm.weight", (width,), ("width",), "norm"),
        )

    def buffers(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return self.layer.buffers(prefix, width)

    def idle_parameters(self, width: int) -> int:
        return self.layer.idle_parameters(width)

    @property
    def attention(self) -> AttentionBlock:
        return self.layer.attention

    @property
    def feedforward(self) -> FeedForwardBlock:
        return self.layer.feedforward

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        own = [t for t in self.tensors("", width) if t.name == "eh_proj.weight"]
        return (*matrices(tuple(own)), *self.layer.matmuls(width))

    def entries(self, width: int) -> int:
        """Return the numbers per token that come in: the state and the embedding of the token ahead."""
        return 2 * width

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """Besides the layer's own: what comes in, both normed side by side, and the last norm's input."""
        own = Kept(0, 2 * width, 2 * width + width, 3, 4 * width, width)
        return own + self.layer.kept(width, grouped)

    def flops(self, width: int, tokens: int, context: float) -> int:
        """Return forward FLOPs without the head, which `Model.flops` counts once per prediction."""
        return 4 * tokens * width * width + self.layer.flops(width, tokens, context)
