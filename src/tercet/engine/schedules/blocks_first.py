"""All micro-batches run through one block before the next: each block's weights are fetched twice a step.

Forward keeps the blocks' inputs alone; backward computes each block again. A block's gradient is complete when its
backward over all micro-batches ends, so it can leave then. Further predictions belong to the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.engine.schedules import StepWork
from tercet.model.decoder import Carried, Decoder


def blocks_first(work: StepWork) -> Tensor:
    module: Decoder = work.module
    blocks = range(len(module.spec.layers))
    work.layout.begin_micro_batch(last=False)  # no gradient is complete before the whole step is
    firsts, carried = [], []
    for n, batch in enumerate(work.micro_batches):
        work.seed(n)
        trained, here = batch.trained_tokens, batch.to(work.device)
        x, more = module.begin(
            here.input_ids, here.positions, here.documents, here.labels, trained=trained, weights=here.weights
        )
        firsts.append(x)
        carried.append(more)
    inputs = [[x.detach() for x in firsts]]  # of every block, and at last of the end; one per micro-batch
    for block in blocks:
        inputs.append(_forward(work, block, inputs[-1], carried))
    loss_sum, grads = _end(work, inputs.pop(), carried)
    for block in reversed(blocks):
        grads = _backward(work, block, inputs.pop(), carried, grads)
    for x, grad in zip(firsts, grads, strict=True):
        x.backward(grad)
    return loss_sum


@torch.no_grad()
def _forward(work: StepWork, block: int, inputs: list[Tensor], carried: list[Carried]) -> list[Tensor]:
    """Return the block's outputs, one per micro-batch."""
    outputs = []
    work.layout.fetch(block)
    for n, (x, more) in enumerate(zip(inputs, carried, strict=True)):
        work.seed(n)
        outputs.append(work.module.run_block(block, x, more)[0])
    work.layout.release(block)
    return outputs


def _end(work: StepWork, inputs: list[Tensor], carried: list[Carried]) -> tuple[Tensor, list[Tensor]]:
    """Run norm, head, loss and further predictions; return (summed loss, gradient of each input)."""
    loss_sum, grads = torch.zeros((), dtype=torch.float64, device=work.device), []
    for n, (x, more) in enumerate(zip(inputs, carried, strict=True)):
        work.seed(n)
        leaf = x.requires_grad_()
        loss = work.module.end(leaf, more)
        if n == len(inputs) - 1:
            work.note_peak()
        (loss / (work.weight / work.scale)).backward()
        loss_sum += loss.detach()
        grads.append(leaf.grad)
    return loss_sum, grads


def _backward(
    work: StepWork, block: int, inputs: list[Tensor], carried: list[Carried], grads: list[Tensor]
) -> list[Tensor]:
    """Compute the block again, with what backward needs, and return the gradient of each input."""
    found = []
    work.layout.fetch(block)
    for n, (x, more, grad) in enumerate(zip(inputs, carried, grads, strict=True)):
        work.seed(n)  # the same random numbers as in forward
        leaf = x.requires_grad_()
        out, balance = work.module.run_block(block, leaf, more)
        ends, ends_grads = [out], [grad]
        if balance is not None:
            ends.append(balance)
            ends_grads.append(torch.full_like(balance, work.scale / work.weight))
        torch.autograd.backward(ends, ends_grads)
        found.append(leaf.grad)
    work.layout.release(block)
    return found
