"""Mixture of experts: every token visits a few of many small SwiGLU experts. Twin of model/moe.py.

Fine-grained and shared experts: DeepSeekMoE, arXiv 2401.06066. Groups of experts (device-limited routing):
DeepSeek-V2, arXiv 2405.04434, section 2.2. Sigmoid gate with a balancing bias: DeepSeek-V3, arXiv 2412.19437,
section 2.1.2, and arXiv 2408.15664.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tercet.spec.blocks.cost import Kept, Matmul, matrices
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.model import Tensor


@dataclass(frozen=True)
class Gate:
    """How a token's experts are chosen and weighed.

    softmax: scores are a softmax over all experts (V1, V2, Qwen); sigmoid: each expert's own (V3).
    With `groups` > 1 only the experts of the best `kept_groups` groups compete; a group's score is its best
    expert's (`group_score` max, V2) or the sum of its two best (top2, V3). With `bias`, a bias per expert that
    no gradient reaches is added for the choice, never for the weight.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False
    normalize: bool = False  # the chosen weights are divided by their sum
    scale: float = 1.0  # then multiplied by this


@dataclass(frozen=True)
class MoE:
    experts: int
    experts_per_token: int
    ffn: int  # inner width of one expert
    shared_experts: int = 0  # visited by every token; built as one SwiGLU of shared_experts * ffn
    gate: Gate = Gate()

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        """Experts stand stacked in memory; on disk each has its own matrices (see spec/families/names.py)."""
        e, f = self.experts, self.ffn
        found = [
            Tensor(f"{prefix}experts.gate_up_proj", (e, 2 * f, width), ("experts", "gate_up", "width"), "expert"),
            Tensor(f"{prefix}experts.down_proj", (e, width, f), ("experts", "width", "ffn"), "expert"),
            Tensor(f"{prefix}gate.weight", (e, width), ("experts", "width"), "router"),
        ]
        if self.shared_experts:
            found += self.shared.tensors(f"{prefix}shared_experts.", width)
        return tuple(found)

    def buffers(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        """Return what is stored with the weights but never trained by a gradient; always fp32."""
        if not self.gate.bias:
            return ()
        return (Tensor(f"{prefix}gate.e_score_correction_bias", (self.experts,), ("experts",), "balance"),)

    @property
    def shared(self) -> SwiGLU:
        return SwiGLU(self.shared_experts * self.ffn)

    def idle_parameters(self, width: int) -> int:
        """Return the parameters of the experts that a token does not visit."""
        return (self.experts - self.experts_per_token) * 3 * width * self.ffn

    def flops(self, width: int, tokens: int, context: float) -> int:
        router = 2 * tokens * width * self.experts
        routed = self.experts_per_token * SwiGLU(self.ffn).flops(width, tokens, context)
        shared = self.shared.flops(width, tokens, context) if self.shared_experts else 0
        return router + routed + shared

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return matrices(self.tensors("", width), self.experts_per_token)

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """The gate in fp32 (scores, weights, indices), and of each token's experts what the way of running them holds.

        `grouped`: one matmul over all experts, as on a card. Each token's row is copied once per expert, and each
        expert's output row waits for its weight's gradient. Else experts run one after the other, as on a CPU: only
        the results of gate and up are held, and selective recomputation holds each expert's output.
        """
        k, f, e = self.experts_per_token, self.ffn, self.experts
        gate = Kept(0, 0, 0, e + (9 if grouped else 8) * k + 3, 0, 0, e, widened=width)
        if grouped:
            routed = Kept(width + k * width, k * (2 * f + width), k * f, 0, 0, k * (2 * f + width))
        else:
            routed = Kept(width, k * 2 * f, 0, 0, 0, k * width)
        moved = Kept(0, 0, 0, 0, k * (3 * f + 4 * width))
        shared = self.shared.kept(width) if self.shared_experts else Kept(0, 0, 0, 0, 0)
        return gate + routed + moved + replace(shared, inputs=0)  # both read the same row
