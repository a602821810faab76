"""What layers keep of the tokens so far. One object a layer; an attention block adds what is its own and gets it whole.

Shape letters: B rows (texts), T new tokens, L tokens so far, the new ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    def add(self, name: str, new: Tensor) -> Tensor:
        """Keep `new` (B, T, …) under a name; return all that is kept of these rows, (B, L, …)."""
        ...

    def mask(self, window: int | None) -> Tensor | None:
        """Return what each new token sees, (B, 1, T, L) booleans; None: all before it, and the rows are alike."""
        ...


class Growing(dict[str, Tensor]):
    """Rows of one length that grow together."""

    def add(self, name: str, new: Tensor) -> Tensor:
        self[name] = torch.cat((self[name], new), 1) if name in self else new
        return self[name]

    def mask(self, window: int | None) -> None:
        return None


@dataclass
class _Place:
    """Where the new tokens of a forward lie: rows `rows` of the slots, at their own positions (B, T).

    begin: the first one's position where it is the same in all rows, else None.
    """

    rows: slice
    positions: Tensor
    longest: int
    begin: int | None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Tensor:
        return torch.arange(len(self.positions), device=self.positions.device)[:, None]

    def write(self, rows: Tensor, new: Tensor) -> None:
        if self.begin is None:
            rows[self.numbers, self.positions] = new
        else:
            rows[:, self.begin : self.longest] = new

    def mask(self, window: int | None) -> Tensor | None:
        whole = self.begin == 0 or self.begin == self.longest - 1
        if whole and (window is None or self.longest <= window):
            return None
        if window not in self.masks:
            keys = torch.arange(self.longest, device=self.positions.device)
            seen = keys <= self.positions[..., None]
            if window is not None:
                seen &= keys > self.positions[..., None] - window
            self.masks[window] = seen.unsqueeze(1)
        return self.masks[window]


class Slots:
    """Room for `rows` texts of unequal lengths: a token's numbers lie at its position, so nothing is shifted or padded.

    What lies beyond a text's length is garbage that its mask never shows. Room grows by doubling, up to `capacity`
    tokens a row.
    """

    def __init__(self, layers: int, rows: int, capacity: int):
        self.rows, self.capacity, self.room = rows, capacity, 0
        self._kept: list[dict[str, Tensor]] = [{} for _ in range(layers)]

    def at(self, rows: slice, positions: Tensor) -> list[Slot]:
        """Return one cache a layer for a forward of rows `rows`; their `positions` (B, T) are consecutive."""
        begins = positions[:, 0].tolist()
        longest = max(begins) + positions.shape[1]
        if longest > self.room:
            self._grow(min(self.capacity, max(64, 1 << (longest - 1).bit_length())))
        place = _Place(rows, positions, longest, begins[0] if len(set(begins)) == 1 else None)
        return [Slot(self, kept, place) for kept in self._kept]

    def _grow(self, room: int) -> None:
        for kept in self._kept:
            for name, old in kept.items():
                kept[name] = old.new_zeros(self.rows, room, *old.shape[2:])
                kept[name][:, : self.room] = old
        self.room = room

    def move(self, source: int, target: int, length: int) -> None:
        for kept in self._kept:
            for whole in kept.values():
                whole[target, :length] = whole[source, :length]

    def copy(self, row: int, length: int) -> list[dict[str, Tensor]]:
        """Return the first `length` tokens of a row, layer by layer."""
        return [{name: whole[row, :length].clone() for name, whole in kept.items()} for kept in self._kept]

    def put(self, row: int, length: int, copied: list[dict[str, Tensor]]) -> None:
        """Fill a row's first `length` tokens from what `copy` gave."""
        if length > self.room:
            self._grow(min(self.capacity, max(64, 1 << (length - 1).bit_length())))
        for kept, layer in zip(self._kept, copied, strict=True):
            for name, part in layer.items():
                kept[name][row, :length] = part[:length]

    @property
    def nbytes(self) -> int:
        return sum(whole.nbytes for kept in self._kept for whole in kept.values())


@dataclass
class Slot:
    """One layer's cache during one forward."""

    slots: Slots
    kept: dict[str, Tensor]
    place: _Place

    def add(self, name: str, new: Tensor) -> Tensor:
        if name not in self.kept:
            self.kept[name] = new.new_zeros(self.slots.rows, self.slots.room, *new.shape[2:])
        rows = self.kept[name][self.place.rows]
        self.place.write(rows, new)
        return rows[:, : self.place.longest]

    def mask(self, window: int | None) -> Tensor | None:
        return self.place.mask(window)
