"""The order of a step's work over micro-batches and blocks: one file each. The only place that picks one.

A schedule is a function of a StepWork that runs forward and backward of all micro-batches, leaves every gradient
added up where the layout wants it, and returns the summed loss of this rank, fp64 on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, device

if TYPE_CHECKING:
    from tercet.engine import MicroBatch
    from tercet.model.objective import RowLosses
    from tercet.parallel.layout import Layout
    from tercet.spec.strategy import Strategy


@dataclass(frozen=True)
class StepWork:
    """What a schedule orders. `seed(n)` starts the random numbers of micro-batch n; `note_peak` looks at memory."""

    module: Any  # a Decoder, or what is called like one
    layout: Layout
    micro_batches: Sequence[MicroBatch]  # on the host
    # The step's trained tokens on all ranks, by their weights: with the loss divided by it, any split gives the same sum.
    weight: float
    device: device
    seed: Callable[[int], None]
    note_peak: Callable[[], None]
    scale: float = 1.0  # of the loss before backward (engine/scaling.py); the loss returned is without it
    rows: RowLosses | None = None  # told the loss of each row, micro-batch by micro-batch


Schedule = Callable[[StepWork], Tensor]


def schedule_of(strategy: Strategy) -> Schedule:
    if strategy.engine == "host":
        from tercet.engine.schedules.blocks_first import blocks_first

        return blocks_first
    from tercet.engine.schedules.micro_batches_first import micro_batches_first

    return micro_batches_first


def loss_of(module: Any, batch: MicroBatch, device: device, rows: RowLosses | None = None) -> Tensor:
    """Return the summed loss of a batch on the host. What must be counted is counted there: a card is not waited for."""
    trained, here = batch.trained_tokens, batch.to(device)
    return module(
        here.input_ids,
        positions=here.positions,
        documents=here.documents,
        labels=here.labels,
        trained=trained,
        weights=here.weights,
        **({} if rows is None else {"rows": rows}),
    )
