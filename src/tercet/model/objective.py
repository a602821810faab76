"""The training objective: summed next-token loss, without ever holding all logits.

Labels arrive shifted (data/loader.py is the one place that shifts): labels[b, t] is what position t predicts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.spec.objective import CHUNK_TOKENS, IGNORED


class RowLosses:
    """The summed loss of every row that was computed, fp64 on the device: a tensor per call, in the order of the calls.

    No tensor itself, so that whatever casts or moves a module's arguments leaves it alone.
    """

    def __init__(self) -> None:
        self.noted: list[Tensor] = []

    def begin(self, rows: int, device: torch.device) -> Tensor:
        """Return zeros to which the losses of a call's rows are to be added."""
        self.noted.append(torch.zeros(rows, dtype=torch.float64, device=device))
        return self.noted[-1]


class _LinearCrossEntropy(torch.autograd.Function):
    """sum over tokens of (logsumexp(h Wᵀ) - (h Wᵀ)[label]) · weight, both gradients made in forward, chunk by chunk.

    The loss is a sum, so its gradient is known but for one factor, which backward multiplies in. Costs the same
    three matmuls as the plain way and holds one chunk of logits instead of all.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        with_grad: bool,
        counts: Tensor | None = None,
        row_of: Tensor | None = None,
        row_sums: Tensor | None = None,
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden if with_grad else hidden[:0])
        with_head = with_grad and ctx.needs_input_grad[1]  # a frozen head gets no gradient
        grad_weight = torch.zeros(weight.shape if with_head else (0,), dtype=wide, device=weight.device)
        for begin in range(0, hidden.shape[0], CHUNK_TOKENS):
            part = slice(begin, begin + CHUNK_TOKENS)
            ignored = labels[part, None] == IGNORED
            y = labels[part, None].masked_fill(ignored, 0)
            h = hidden[part].masked_fill(ignored, 0)
            # Cast here: log_softmax(dtype=…) would on a CPU cast itself and hold all three, logits in both formats.
            scores = F.log_softmax(F.linear(h, weight).to(wide), -1)
            found = scores.gather(1, y).masked_fill_(ignored, 0)
            found = found if counts is None else found * counts[part, None]
            total -= found.sum()
            if row_of is not None and row_sums is not None:
                row_sums.index_add_(0, row_of[part], found.squeeze(1).double(), alpha=-1)
            if with_grad:
                # softmax - one_hot, written over the scores
                grad = scores.exp_()
                grad.scatter_add_(1, y, torch.full_like(y, -1, dtype=wide))
                if counts is not None:
                    grad *= counts[part, None]
                grad = grad.to(hidden.dtype)
                torch.mm(grad, weight, out=grad_hidden[part]).masked_fill_(ignored, 0)
                if with_head:
                    grad_weight += grad.T @ h
            scores = grad = None  # before the next chunk's are made: two chunks would be held at once
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: a second copy of the head's gradient would be the largest thing held. Running backward twice is
        # then an error, which autograd reports.
        grad_hidden.mul_(grad.to(grad_hidden.dtype))
        head = grad_weight.mul_(grad).to(grad_hidden.dtype) if len(grad_weight) else None
        return grad_hidden, head, None, None, None, None, None


def next_token_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    count: int | None = None,
    weights: Tensor | None = None,
    rows: RowLosses | None = None,
) -> Tensor:
    """Return the summed loss, a scalar in fp32 (fp64 for fp64 models), over the labels that are not IGNORED.

    hidden: (batch, tokens, width), after the final norm; head: (vocabulary, width); labels: (batch, tokens).
    `count` is the number of labels that count, where the host knows it: a card is never asked. `weights`: (batch,
    tokens), by how much each label counts; without them by 1. `rows` is told what each row adds to the sum.
    """
    row_of = row_sums = None
    if rows is not None:
        row_sums = rows.begin(labels.shape[0], labels.device)
        row_of = torch.arange(labels.shape[0], device=labels.device).repeat_interleave(labels.shape[1])
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    counts = None if weights is None else weights.flatten()
    trained = labels != IGNORED
    if count is None:
        count = int(trained.sum()) if labels.is_cpu else len(labels)
    if 8 * count < 7 * len(labels):
        # What is not trained is not computed. Where that is little, it is: matmuls of ever other sizes cost more on
        # a CPU, which compiles and keeps each.
        places = torch.nonzero_static(trained, size=count).squeeze(1)
        hidden, labels = hidden[places], labels[places]
        counts = None if counts is None else counts[places]
        row_of = None if row_of is None else row_of[places]
    return _LinearCrossEntropy.apply(hidden, head, labels, torch.is_grad_enabled(), counts, row_of, row_sums)
