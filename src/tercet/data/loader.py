"""From packed rows to batches of tensors. Its state is one integer, the step; the rest follows from the seed.

Shapes: B rows, T tokens (`sequence_tokens`), n documents in a batch, padding counted as a document of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tercet.data.stream import StreamMix
from tercet.spec.objective import IGNORED

if TYPE_CHECKING:
    from tercet.data.mix import Mix
    from tercet.data.prepare import Prepared
    from tercet.data.shards import Rows

IDLE = -1  # number of a place that holds no row


@dataclass
class Batch:
    """Rows for one micro-batch.

    `input_ids` (B, T) int64. `labels` (B, T) int64: the token to predict at each place, already shifted,
    -100 where nothing is trained; this is the only place in Tercet that shifts. `positions` (B, T) int64:
    from 0 within each document. `documents` (n+1,) int32: where documents begin in the flattened B·T
    tokens, and the end; borders of rows are borders of documents. `rows`: number of the sample in each
    place, -1 for a padding row. `weights` (B, T) float32: by how much each label counts in the loss; None: by 1.
    `sources`: the number of each row's source, -1 for a padding row; None where rows are of one.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    rows: list[int]
    weights: Tensor | None = None
    sources: list[int] | None = None

    @property
    def trained_tokens(self) -> int:
        """Number of labels that count in the loss."""
        return int((self.labels != IGNORED).sum())

    @property
    def trained_weight(self) -> float:
        """Sum of the weights of the labels that count; without weights their number."""
        if self.weights is None:
            return float(self.trained_tokens)
        return float(self.weights[self.labels != IGNORED].double().sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; `documents` stays on the host, which counts by it.

        Copies to a card start from pinned memory, so the host does not wait for them.
        """
        if torch.device(device).type == "cpu":
            return self
        there = {
            n: t.pin_memory().to(device, non_blocking=True) for n in _TENSORS if (t := getattr(self, n)) is not None
        }
        return replace(self, **there)


_TENSORS = ("input_ids", "labels", "positions", "weights")


class Loader:
    """Deals the same global batches to any number of ranks.

    A step's row i is sample `step · batch_sequences + i` of the endless order, so a set smaller than a
    batch simply goes on into its next epoch, and nothing is left over at the end of one.
    """

    def __init__(self, prepared: Prepared, batch_sequences: int, seed: int):
        stream = prepared.stream
        self.mix: Mix | StreamMix = replace(prepared.train, seed=seed) if stream is None else stream.seeded(seed)
        self.validation = prepared.validation
        self.batch_sequences = batch_sequences
        self.tokens = prepared.sequence_tokens
        self.pad_id = prepared.pad_id
        sets = (*prepared.train.sources, *([self.validation] if self.validation is not None else []))
        # What weights the chats to come have is not known of a stream.
        self._weighted = any(weighted(s) or (stream is not None and s.palette is not None) for s in sets)

    @property
    def rows_per_epoch(self) -> int:
        return self.mix.rows_per_epoch

    def micro_batches(self, step: int, *, rank: int, ranks: int, micro_batch: int) -> list[Batch]:
        """Return the micro-batches of a step (from 0) for share `rank` of `ranks`: the mesh's data ranks.

        Place j of micro-step a on rank r holds row (a · ranks + r) · micro_batch + j of the global batch;
        places beyond the batch are idle. Every rank gets ceil(batch_sequences / (ranks · micro_batch)) of
        them.
        """
        start = step * self.batch_sequences
        if isinstance(self.mix, StreamMix):
            self.mix.ready(range(start, start + self.batch_sequences), ahead=rank == 0)
        batches = []
        for places in _deal(self.batch_sequences, rank, ranks, micro_batch):
            numbers = [start + i if i < self.batch_sequences else IDLE for i in places]
            batches.append(self._batch(numbers))
        return batches

    def evaluation(self, *, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        """Yield a data rank's share of the held-out rows, in their order: each row once over all ranks.

        Every rank gets the same number of batches; padding rows fill up the last. Nothing when nothing is
        held out.
        """
        if self.validation is not None:
            share = rows_once(
                self.validation, self.pad_id, self._weighted, rank=rank, ranks=ranks, micro_batch=micro_batch
            )
            yield from share

    def _batch(self, numbers: Sequence[int]) -> Batch:
        places = {n: self.mix.rows_at(n) for n in numbers if n != IDLE}
        batch = make_batch(numbers, lambda n: places[n][1:], self.tokens, self.pad_id, self._weighted)
        batch.sources = [places[n][0] if n != IDLE else IDLE for n in numbers]
        return batch


def weighted(rows: Rows) -> bool:
    """Return whether labels count by other weights than 0 and 1."""
    return any(weight not in (0.0, 1.0) for weight in rows.palette or ())


def rows_once(
    rows: Rows, pad_id: int, with_weights: bool, *, rank: int, ranks: int, micro_batch: int
) -> Iterator[Batch]:
    """Yield a rank's share of packed rows, in their order: each row once over all ranks, equally many batches each."""
    count = len(rows)
    for places in _deal(count, rank, ranks, micro_batch):
        numbers = [i if i < count else IDLE for i in places]
        yield make_batch(numbers, lambda row: (rows, row), rows.capacity, pad_id, with_weights)


def make_batch(
    numbers: Sequence[int], place_of: Callable[[int], tuple[Rows, int]], capacity: int, pad_id: int, with_weights: bool
) -> Batch:
    """Return the rows of these numbers as tensors, each row filled up to `capacity` tokens."""
    shape = (len(numbers), capacity)
    ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    positions = np.empty(shape, np.int64)
    weights = np.ones(shape, np.float32) if with_weights else None
    lengths: list[np.ndarray] = []
    everywhere = np.arange(capacity)
    for place, number in enumerate(numbers):
        tokens, documents, trained = ids[place, :0], np.zeros(0, np.int64), None
        if number != IDLE:
            rows, index = place_of(number)
            tokens, documents = rows.row(index)
            trained = rows.trained(index)
        used = tokens.size
        if used < capacity:
            documents = np.append(documents, capacity - used)  # padding is a document nobody trains
        starts = np.cumsum(documents) - documents
        ids[place, :used] = tokens
        labels[place, : max(used - 1, 0)] = ids[place, 1:used]
        # The last token of a document has no successor: the next one belongs to somebody else.
        labels[place, starts[1:] - 1] = IGNORED
        if trained is not None:
            labels[place, : max(used - 1, 0)][trained[1:] == 0] = IGNORED
            if weights is not None:
                weights[place, : max(used - 1, 0)] = trained[1:]
        positions[place] = everywhere - np.repeat(starts, documents)
        lengths.append(documents)
    borders = np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int32)
    tensors = map(torch.from_numpy, (ids, labels, positions, borders))
    counts = None if weights is None else torch.from_numpy(weights)
    return Batch(*tensors, rows=list(numbers), weights=counts)


def _deal(count: int, rank: int, ranks: int, micro_batch: int) -> Iterator[range]:
    """Yield, per micro-step, the places of a rank among `count` rows; the last ones may lie beyond them."""
    for step in range(-(-count // (ranks * micro_batch))):
        first = (step * ranks + rank) * micro_batch
        yield range(first, first + micro_batch)
