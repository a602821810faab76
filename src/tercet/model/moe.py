"""Mixture of experts with DeepSeek's gates. Twin of spec/blocks/moe.py, which cites the papers.

Shape letters: B rows, T tokens, N = B * T, K experts per token, E experts, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.model.balance import Tally, balance_loss, count_in_backward
from tercet.model.experts import Experts
from tercet.model.swiglu import FeedForward
from tercet.spec.blocks.moe import MoE

# What the gate decides: weights (N, K) and scores (N, E) in fp32, experts (N, K). A plain tuple, because DeepSpeed's
# ZeRO-3 finds a module's outputs in tuples only, and gathers weights for backward by them.
Choice = tuple[Tensor, Tensor, Tensor]


class Gate(nn.Module):
    """Chooses each token's experts. Always computes in fp32, whatever the model's type or autocast says."""

    e_score_correction_bias: Tensor
    counts: Tensor
    share: Tensor

    def __init__(self, spec: MoE, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, width))
        if spec.gate.bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(spec.experts, dtype=torch.float32))
        # Tokens sent to each expert in this optimizer step, and each expert's share of the last one.
        self.register_buffer("counts", torch.zeros(spec.experts, dtype=torch.float32), persistent=False)
        self.register_buffer("share", torch.zeros(spec.experts, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True):
        """Move with the model but stay fp32: in bf16 a bias could not take steps of 0.001, nor a count pass 256."""
        super()._apply(fn, recurse)
        for name, moved in list(self._buffers.items()):
            if moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = moved.float()
        return self

    def forward(self, x_NW: Tensor) -> Choice:
        """Return (weights, experts, scores)."""
        gate = self.spec.gate
        with torch.autocast(x_NW.device.type, enabled=False):
            logits = F.linear(x_NW.float(), self.weight.float())
            scores = logits.softmax(-1) if gate.scoring == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if gate.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if gate.scale != 1.0:
            weights = weights * gate.scale
        return weights, experts, scores

    def _choose(self, scores: Tensor) -> Tensor:
        """Return each token's experts, (N, K): the best by score plus bias, within its best groups."""
        spec, gate = self.spec, self.spec.gate
        if gate.bias:
            scores = scores + self.e_score_correction_bias
        if gate.groups > 1:
            by_group = scores.unflatten(-1, (gate.groups, -1))
            if gate.group_score == "top2":
                group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
            else:
                group_scores = by_group.amax(-1)
            kept = group_scores.topk(gate.kept_groups, dim=-1, sorted=False).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
            scores = by_group.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(spec.experts_per_token, dim=-1, sorted=False).indices


class MixtureOfExperts(nn.Module):
    """x (batch, tokens, width) -> (the same shape, balance loss). Without a tally the loss is None.

    `experts` is the seam for expert parallelism: a module (x_NW, experts_NK, weights_NK) -> (N, W).
    """

    def __init__(self, spec: MoE, width: int):
        super().__init__()
        self.spec = spec
        self.experts = Experts(spec, width)
        self.gate = Gate(spec, width)
        self.shared_experts = FeedForward(spec.shared, width) if spec.shared_experts else None

    def forward(self, x: Tensor, tally: Tally | None = None) -> tuple[Tensor, Tensor | None]:
        flat = x.flatten(0, -2)
        weights, chosen, scores = self.gate(flat)
        loss = None
        if tally is not None:
            weights = count_in_backward(weights, chosen, tally, self.gate.counts)
            loss = balance_loss(scores, chosen, tally, self.gate.share)
        out = self.experts(flat, chosen, weights).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, loss
