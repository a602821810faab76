"""Keeping experts balanced: counts, the bias that follows them, and the two balance losses.

All of it is independent of micro-batches, accumulation and ranks:

- Counts are added in backward, so each trained token counts once: not twice under recomputation, never in
  evaluation or in a dry forward. The engine sums them over ranks and moves the bias once per optimizer step.
- Losses are sums like the main loss (a row weighs as much as it has trained tokens), so the one division by the
  step's global token count gives the same strength under every layout.
- Statistics are taken over the tokens of documents that have something to train: padding has none.

The sequence loss's statistics are those of one packed row (DeepSeek-V3's "sequence"), the classic loss's are the
shares of the last optimizer step: all tokens of all ranks, known to everybody, and without a gradient anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tercet.spec.model import Balance
from tercet.spec.objective import IGNORED


@dataclass(frozen=True)
class Tally:
    """Which tokens of a batch count, and how much a row weighs. Made once per forward that trains."""

    counted: Tensor  # bool (B, T): tokens of documents with at least one trained label
    counted_per_row: Tensor  # fp32 (B,)
    trained_per_row: Tensor  # fp32 (B,): labels that are trained, by their weights
    balance: Balance

    @classmethod
    def of(cls, labels: Tensor, documents: Tensor | None, balance: Balance, weights: Tensor | None = None) -> Tally:
        """labels: (B, T) shifted, IGNORED where nothing is trained; documents: borders over B * T, or one a row;
        weights: (B, T), of the labels in the loss."""
        trained = labels != IGNORED
        if documents is None:
            counted = trained.any(1, keepdim=True).expand_as(labels)
        else:
            number = document_numbers(documents, labels.numel(), labels.device)
            per_document = torch.zeros(documents.numel(), device=labels.device)
            per_document.index_add_(0, number, trained.flatten().float())
            counted = (per_document[number] > 0).view_as(labels)
        per_row = trained.sum(1).float() if weights is None else (weights * trained).sum(1)
        return cls(counted, counted.sum(1).float(), per_row, balance)


def document_numbers(documents: Tensor, tokens: int, device: torch.device) -> Tensor:
    """Return for each of the flattened tokens the number of its document, (tokens,) long."""
    ends = documents[1:].to(device=device, dtype=torch.int64)
    marks = torch.zeros(tokens + 1, dtype=torch.int64, device=device)
    return marks.index_add_(0, ends, torch.ones_like(ends))[:tokens].cumsum(0)


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, tokens_per_expert: Tensor, counts: Tensor) -> Tensor:
        # Kept outside save_for_backward on purpose: what is saved there is made again under recomputation.
        ctx.tokens_per_expert, ctx.counts = tokens_per_expert, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.counts += ctx.tokens_per_expert
        return grad, None, None


def count_in_backward(weights_NK: Tensor, experts_NK: Tensor, tally: Tally, counts: Tensor) -> Tensor:
    """Return the weights unchanged; when their gradient passes, `counts` (E,) grows by the tokens sent."""
    counted = tally.counted.flatten().to(counts.dtype).unsqueeze(1).expand_as(experts_NK)
    sent = torch.zeros_like(counts).index_add_(0, experts_NK.flatten(), counted.flatten())
    return _CountInBackward.apply(weights_NK, sent, counts)


def balance_loss(scores_NE: Tensor, experts_NK: Tensor, tally: Tally, share: Tensor) -> Tensor | None:
    """Return the summed balance loss of a layer, or None when both weights are 0.

    Sequence loss: alpha * sum_i f_i P_i per row (DeepSeek-V3, arXiv 2412.19437, equations 17-20), times the
    row's trained tokens. Classic loss: the same form with f_i from the last step (Switch, arXiv 2101.03961).
    """
    balance = tally.balance
    if not balance.sequence_loss and not balance.batch_loss:
        return None
    batch, experts, chosen = tally.counted.shape[0], scores_NE.shape[1], experts_NK.shape[1]
    counted = tally.counted.to(scores_NE.dtype)
    length = tally.counted_per_row.clamp(min=1).to(scores_NE.dtype)
    shares = (scores_NE / scores_NE.sum(-1, keepdim=True)).view(batch, -1, experts)
    mean_BE = torch.einsum("bte,bt->be", shares, counted) / length[:, None]
    weight = tally.trained_per_row.to(scores_NE.dtype)
    total = scores_NE.new_zeros(())
    if balance.sequence_loss:
        sent = torch.zeros_like(mean_BE)
        per_choice = counted.unsqueeze(-1).expand(-1, -1, chosen)
        sent.scatter_add_(1, experts_NK.view(batch, -1), per_choice.reshape(batch, -1))
        frequency = sent * (experts / chosen) / length[:, None]
        total = total + balance.sequence_loss * (weight * (frequency * mean_BE).sum(1)).sum()
    if balance.batch_loss:
        last = share.to(scores_NE.dtype) * experts
        total = total + balance.batch_loss * (weight * (mean_BE * last).sum(1)).sum()
    return total


@dataclass(frozen=True)
class Load:
    """How full the experts were in one optimizer step. `counts` is (layers with experts, experts), all ranks."""

    counts: Tensor

    @property
    def choices(self) -> int:
        """Choices made: trained tokens times experts per token times layers; nothing is dropped."""
        return int(self.counts.sum())

    @property
    def worst(self) -> float:
        """Load of the fullest expert over the mean, the worst layer's; 1 is perfect balance."""
        mean = self.counts.mean(1).clamp(min=1e-9)
        return float((self.counts.amax(1) / mean).max())

    @property
    def idle(self) -> int:
        """Experts that no token was sent to."""
        return int((self.counts == 0).sum())


class Balancer:
    """The engine's handle on all gates of a module: counts out, summed counts in, state to save."""

    def __init__(self, module: nn.Module):
        from tercet.model.moe import Gate  # that module builds on this one

        self._gates: dict[str, Gate] = {
            name.replace("_checkpoint_wrapped_module.", ""): m
            for name, m in module.named_modules()
            if isinstance(m, Gate)
        }

    def __bool__(self) -> bool:
        return bool(self._gates)

    def counts(self) -> Tensor:
        """Return this rank's counts since the last update, float64 (layers, experts) on the CPU; sum over ranks."""
        return torch.stack([gate.counts for gate in self._gates.values()]).double().cpu()

    def drop_counts(self) -> None:
        """Forget the counts of a step that changed nothing."""
        for gate in self._gates.values():
            gate.counts.zero_()

    @torch.no_grad()
    def update(self, counts: Tensor, bias_speed: float) -> Load:
        """Move each bias by bias_speed towards balance (arXiv 2408.15664, algorithm 1) and start counting anew.

        counts: the sum over all ranks, as `counts` returns them. Call once, after the optimizer's step.
        """
        for gate, sent in zip(self._gates.values(), counts, strict=True):
            if sent.sum() > 0:
                gate.share.copy_(sent / sent.sum())
                if bias_speed and gate.spec.gate.bias:
                    direction = torch.sign(sent.mean() - sent).to(gate.share.device, torch.float32)
                    gate.e_score_correction_bias.add_(direction, alpha=bias_speed)
            gate.counts.zero_()
        return Load(counts)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, fp32 tensor) of everything that outlives a step; `share` belongs to checkpoints only."""
        for name, gate in self._gates.items():
            if gate.spec.gate.bias:
                yield f"{name}.e_score_correction_bias", gate.e_score_correction_bias
            yield f"{name}.share", gate.share

    def biases(self) -> dict[str, Tensor]:
        """Return what a saved model holds, by its name in the file."""
        return {name: t for name, t in self.state() if name.endswith("e_score_correction_bias")}
