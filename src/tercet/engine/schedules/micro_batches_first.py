"""Each micro-batch runs forward and backward through all blocks before the next begins: one set of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.engine.schedules import StepWork, loss_of


def micro_batches_first(work: StepWork) -> Tensor:
    loss_sum = torch.zeros((), dtype=torch.float64, device=work.device)
    for n, batch in enumerate(work.micro_batches):
        last = n == len(work.micro_batches) - 1
        work.layout.begin_micro_batch(last)
        work.seed(n)
        loss = loss_of(work.module, batch, work.device, work.rows)
        if last:
            work.note_peak()
        (loss / (work.weight / work.scale)).backward()
        loss_sum += loss.detach()
    return loss_sum
