"""The loss of each source of a mix: sums over its rows, so that micro-batches, ranks and steps add up exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercet.engine import MicroBatch
from tercet.model.objective import RowLosses
from tercet.spec.objective import IGNORED


class SourceSums:
    """Adds up per source what a rank's rows weigh and lose in a step. Of one source alone nothing is added up."""

    def __init__(self, sources: int):
        self.count = sources if sources > 1 else 0

    def rows(self) -> RowLosses | None:
        """Return what the model is to tell the rows' losses to."""
        return RowLosses() if self.count else None

    def weights(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the sum of the trained labels' weights of each source, (sources,) fp64."""
        return self._by_source(micro_batches, [_row_weights(b) for b in micro_batches] if self.count else [])

    def losses(self, micro_batches: Sequence[MicroBatch], rows: RowLosses | None) -> Tensor:
        """Return the summed loss of each source, (sources,) fp64 on the host; `rows` was told one after another."""
        return self._by_source(micro_batches, [] if rows is None else [r.cpu() for r in rows.noted])

    def _by_source(self, micro_batches: Sequence[MicroBatch], of_rows: Sequence[Tensor]) -> Tensor:
        sums = torch.zeros(self.count, dtype=torch.float64)
        for batch, values in zip(micro_batches, of_rows, strict=False):
            # A place without a row has nothing to add, so it may be anybody's.
            places = torch.tensor([max(s, 0) for s in batch.sources or [0] * len(values)])
            sums.index_add_(0, places, values)
        return sums


def _row_weights(batch: MicroBatch) -> Tensor:
    trained = batch.labels != IGNORED
    counts = trained.double() if batch.weights is None else batch.weights.double() * trained
    return counts.sum(1)


def pairs(losses: Tensor, weights: Tensor) -> tuple[tuple[float, float], ...]:
    """Return (summed loss, summed weight) per source."""
    return tuple(zip(losses.tolist(), weights.tolist(), strict=True))
