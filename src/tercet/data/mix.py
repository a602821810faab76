"""Which row is trained as the n-th: the sources joined by their weights, in the order of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from tercet.data import order
from tercet.data.shards import Rows
from tercet.errors import InputError
from tercet.spec.recipe import DataSection


@dataclass(frozen=True)
class Mix:
    """Packed rows of one or more sources. `weights` has one per source, or is None: all rows once per epoch.

    With weights, sample n goes to the source that is furthest behind its share, and takes the next row of
    that source's own endless sequence of permutations: shares are exact at every step, not on average.
    """

    sources: tuple[Rows, ...]
    weights: tuple[float, ...] | None
    seed: int
    epoch_rows: int | None = None  # where sources say how often an epoch repeats them

    @cached_property
    def rows_per_epoch(self) -> int:
        """Rows of all sources together, as often as they are repeated; with weights the name for that many samples."""
        return sum(len(s) for s in self.sources) if self.epoch_rows is None else self.epoch_rows

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """Share of the trained sequences per source; they sum to 1."""
        numbers = [Fraction(str(w)) for w in self.weights] if self.weights else [Fraction(len(s)) for s in self.sources]
        return tuple(n / sum(numbers) for n in numbers)

    @cached_property
    def _borders(self) -> np.ndarray:
        return np.cumsum([len(s) for s in self.sources])

    def place(self, sample: int) -> tuple[int, int]:
        """Return (source, row in it) of sample number `sample`, from 0. A function of the seed and the
        number.
        """
        if self.weights is None:
            epoch, inside = divmod(sample, self.rows_per_epoch)
            row = int(self._order(self.rows_per_epoch, epoch)[inside])
            source = int(np.searchsorted(self._borders, row, side="right"))
            return source, row - (int(self._borders[source - 1]) if source else 0)
        source, before = order.owner(self.shares, sample)
        epoch, inside = divmod(before, len(self.sources[source]))
        return source, int(self._order(len(self.sources[source]), epoch, source)[inside])

    def rows_at(self, sample: int) -> tuple[int, Rows, int]:
        """Return (source, its rows, row in them) of sample number `sample`."""
        source, row = self.place(sample)
        return source, self.sources[source], row

    @cached_property
    def _orders(self) -> dict[tuple[int, ...], tuple[int, np.ndarray]]:
        return {}

    def _order(self, count: int, epoch: int, *source: int) -> np.ndarray:
        """Return a source's permutation of an epoch. One is kept per source, however many there are."""
        kept = self._orders.get(source)
        if kept is None or kept[0] != epoch:
            kept = self._orders[source] = (epoch, order.permutation(count, self.seed, epoch, *source))
        return kept[1]

    def row(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, lengths of the documents) of sample number `sample`."""
        source, row = self.place(sample)
        return self.sources[source].row(row)


@dataclass(frozen=True)
class Mixing:
    """What a recipe says of its sources: weights, or epochs, or a temperature, or none of them."""

    weights: tuple[float, ...] | None
    epochs: tuple[float, ...] | None
    temperature: float

    @classmethod
    def of(cls, data: DataSection) -> Mixing:
        """Raises InputError for a mix of two ways."""
        weights = read_weights([s.weight for s in data.train], [s.path for s in data.train])
        epochs = tuple(1.0 if s.epochs is None else s.epochs for s in data.train)
        repeats = epochs if any(s.epochs is not None for s in data.train) else None
        said = [n for n, there in (("weight", weights), ("epochs", repeats)) if there]
        said += ["data.temperature"] if data.temperature != 1 else []
        if len(said) > 1:
            raise InputError(
                f"data.train: {' and '.join(said)} are given, and each of them says how sources share the training",
                "Give one of them.",
            )
        return cls(weights, repeats, data.temperature)

    def mix(self, sources: tuple[Rows, ...], seed: int) -> Mix:
        sizes = [len(s) for s in sources]
        if self.epochs is not None:
            wanted = [size * epochs for size, epochs in zip(sizes, self.epochs, strict=True)]
            return Mix(sources, tuple(wanted), seed, max(1, round(sum(wanted))))
        if self.temperature != 1:
            return Mix(sources, tuple(size ** (1 / self.temperature) for size in sizes), seed)
        return Mix(sources, self.weights, seed)


def read_weights(weights: Sequence[float | None], names: Sequence[str]) -> tuple[float, ...] | None:
    """Return the sources' weights, or None when none is given. Raises InputError when only some have one."""
    if all(w is None for w in weights):
        return None
    if missing := [n for n, w in zip(names, weights, strict=True) if w is None]:
        raise InputError(
            f"data.train: {', '.join(missing)} has no weight, but other sources have one",
            "Give every source a weight, or none: then every row is trained once per epoch.",
        )
    return tuple(float(w) for w in weights if w is not None)
