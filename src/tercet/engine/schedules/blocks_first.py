"""All micro-batches run through one block before the next: each block's weights are fetched twice a step.

Forward keeps the blocks' inputs alone; backward computes each block again. A block's gradient is complete when its
backward over all micro-batches ends, so it can leave then. Further predictions belong to the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.engine.schedules import StepWork
from tercet.model.decoder import Carried, Decoder
from tercet.parallel.layout import Inputs

BEGIN = -1  # the embedding, as layouts number it


def blocks_first(work: StepWork) -> Tensor:
    module: Decoder = work.module
    end = len(module.spec.layers)
    work.layout.begin_micro_batch(last=False)  # no gradient is complete before the whole step is
    inputs = work.layout.inputs()
    xs, carried = _begin(work)
    for block in range(end):
        _forward(work, block, xs, carried, inputs)
    loss_sum, grads = _end(work, end, xs, carried)
    for block in reversed(range(end)):
        _backward(work, block, grads, carried, inputs)
    _begin_again(work, grads)
    return loss_sum


@torch.no_grad()
def _begin(work: StepWork) -> tuple[list[Tensor], list[Carried]]:
    """Return (what goes into the first block, what every block needs besides), one per micro-batch."""
    xs, carried = [], []
    work.layout.fetch(BEGIN)
    for n in range(len(work.micro_batches)):
        x, more = _begin_one(work, n)
        xs.append(x)
        carried.append(more)
    work.layout.release(BEGIN)
    return xs, carried


def _begin_one(work: StepWork, n: int) -> tuple[Tensor, Carried]:
    batch = work.micro_batches[n]
    work.seed(n)
    trained, here = batch.trained_tokens, batch.to(work.device)
    with torch.enable_grad():  # what is carried says that it trains
        x, more = work.module.begin(
            here.input_ids,
            here.positions,
            here.documents,
            here.labels,
            trained=trained,
            weights=here.weights,
            rows=work.rows,
        )
    return x.detach() if not torch.is_grad_enabled() else x, more


@torch.no_grad()
def _forward(work: StepWork, block: int, xs: list[Tensor], carried: list[Carried], inputs: Inputs) -> None:
    """Put the block's outputs in the place of its inputs, one per micro-batch."""
    work.layout.fetch(block)
    for n, more in enumerate(carried):
        work.seed(n)
        inputs.put(block, n, xs[n])
        xs[n] = work.module.run_block(block, xs[n], more)[0]
    work.layout.release(block)


def _end(work: StepWork, end: int, xs: list[Tensor], carried: list[Carried]) -> tuple[Tensor, list[Tensor]]:
    """Run norm, head, loss and further predictions; return (summed loss, gradient of each input)."""
    loss_sum, grads = torch.zeros((), dtype=torch.float64, device=work.device), []
    work.layout.fetch(end, backward=True)
    for n, more in enumerate(carried):
        work.seed(n)
        leaf = xs[0].requires_grad_()
        del xs[0]  # each gradient takes the room of an input
        loss = work.module.end(leaf, more)
        if not xs:
            work.note_peak()
        (loss / (work.weight / work.scale)).backward()
        loss_sum += loss.detach()
        grads.append(leaf.grad)
    work.layout.release(end, backward=True)
    return loss_sum, grads


def _backward(work: StepWork, block: int, grads: list[Tensor], carried: list[Carried], inputs: Inputs) -> None:
    """Compute the block again, with what backward needs; put the gradients of its inputs in the place of its outputs'."""
    work.layout.fetch(block, backward=True)
    for n, more in enumerate(carried):
        work.seed(n)  # the same random numbers as in forward
        leaf = inputs.get(block, n).requires_grad_()
        out, balance = work.module.run_block(block, leaf, more)
        ends, ends_grads = [out], [grads[n]]
        if balance is not None:
            ends.append(balance)
            ends_grads.append(torch.full_like(balance, work.scale / work.weight))
        torch.autograd.backward(ends, ends_grads)
        assert leaf.grad is not None
        grads[n] = leaf.grad
    work.note_peak()
    work.layout.release(block, backward=True)


def _begin_again(work: StepWork, grads: list[Tensor]) -> None:
    """Give the embedding its gradients. It is looked up again, for its graph alone: kept, its rows would stay."""
    work.layout.fetch(BEGIN, backward=True)
    for n in range(len(grads)):
        x, _ = _begin_one(work, n)
        x.backward(grads[n])
    work.layout.release(BEGIN, backward=True)
