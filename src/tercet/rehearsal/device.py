"""What a simulated card is made of: memory with a limit, streams, counters, and who holds what."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tercet.rehearsal.allocator import Allocator, Block, OutOfCapacity
from tercet.rehearsal.cost import CardRates
from tercet.rehearsal.recorder import MemorySamples
from tercet.rehearsal.timeline import History, OrderError, Timeline
from tercet.units import show_bytes


@dataclass(eq=False)
class Memory:
    """One stretch of card memory: the storage that stands behind it and who has used it. Given back when the last
    tensor on it goes."""

    device: Device
    block: Block | None
    nbytes: int
    row: str
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    history: History = field(default_factory=History)
    recorded: set[int] = field(default_factory=set)  # lanes that record_stream named
    pending: list[Callable[[], object]] = field(default_factory=list)  # copies from the host that have yet to happen

    def __del__(self) -> None:
        self.device.give_back(self)

    def ready(self) -> None:
        for copy in self.pending:
            copy()
        self.pending.clear()


@dataclass
class Counts:
    kernels: Counter[str] = field(default_factory=Counter)
    host_waits: Counter[str] = field(default_factory=Counter)  # by what asked for a value
    bytes_to_card: int = 0
    bytes_to_host: int = 0
    blocking_copies: int = 0
    unpinned_copies: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)


@dataclass
class Peak:
    """The moment of the most memory: which operator, and what was held by ledger row."""

    bytes: int = 0
    operator: str = ""
    number: int = 0
    rows: dict[str, int] = field(default_factory=dict)


class Device:
    """One card: its memory, its streams, its counters."""

    def __init__(self, index: int, capacity_bytes: int, rates: CardRates):
        self.index, self.rates = index, rates
        self.allocator = Allocator(capacity_bytes)
        self.timeline = Timeline(index)
        self.counts = Counts()
        self.row = "temporaries"  # what is allocated now counts as this
        self.held: Counter[str] = Counter()
        self.peak = Peak()
        self.operator, self.number, self.copies = "", 0, 0
        # Copies to the host: (lane, count, what happens then, where the host's memory begins).
        self.owed: list[tuple[int, int, Callable[[], Any], int]] = []
        self.works: set[Any] = set()  # collectives that nobody has waited for
        self.fail_at: int | None = None  # number of the operator that finds no memory
        self.lost_at: int | None = None  # number of the operator at which the card is gone
        self.fail_copy: int | None = None  # number of the copy over the host's link that fails
        self.recorder: MemorySamples | None = None

    def take(self, nbytes: int, storage: torch.UntypedStorage) -> Memory:
        """Return new memory of `nbytes`; raises torch.OutOfMemoryError that says what is held."""
        memory = Memory(self, None, 0, self.row, [storage])
        self.take_again(memory, nbytes)
        return memory

    def take_again(self, memory: Memory, nbytes: int) -> None:
        """Give `memory` a block of `nbytes`, under the ledger row of now."""
        if not nbytes:
            return
        try:
            if self.fail_at is not None and self.number >= self.fail_at:
                raise OutOfCapacity
            memory.block = self.allocator.allocate(nbytes, self.timeline.current)
        except OutOfCapacity:
            raise self._out_of_memory(nbytes) from None
        self._taken_too_early(memory.block, nbytes)
        memory.nbytes, memory.row, memory.history = nbytes, self.row, History()
        self.held[memory.row] += nbytes
        if self.allocator.allocated > self.peak.bytes:
            rows = {row: size for row, size in self.held.items() if size}
            self.peak = Peak(self.allocator.allocated, self.operator, self.number, rows)
        self._sample()

    def _taken_too_early(self, block: Block, nbytes: int) -> None:
        """Raise OrderError when work of another stream may still use a block that this stream takes again."""
        lane = self.timeline.lanes[block.stream]
        for use in block.unfinished:
            if not self.timeline.knows(lane, use):
                raise OrderError(
                    f"card {self.index}: memory of stream {lane.name} was given back while {use.what} on stream "
                    f"{self.timeline.lanes[use.lane].name} may still use it, and {self.operator} takes "
                    f"{show_bytes(nbytes)} of it again: no event and no record_stream"
                )
        block.unfinished = []

    def give_back(self, memory: Memory) -> None:
        if memory.block is None:
            return
        timeline = self.timeline
        lane = timeline.lanes[memory.block.stream]
        other = timeline.unfinished_elsewhere(memory.history, lane)
        if other is not None and other.lane not in memory.recorded:
            memory.block.unfinished.append(other)
        self.held[memory.row] -= memory.nbytes
        self.allocator.release(memory.block)
        memory.block = None
        self._sample()

    def settle(self) -> None:
        """Let the copies to the host happen that the host has waited for."""
        known, later = self.timeline.host_known, []
        for lane, count, copy, place in self.owed:
            if known.get(lane, 0) >= count:
                copy()
            else:
                later.append((lane, count, copy, place))
        self.owed = later

    def count_operator(self, name: str) -> None:
        """Note which operator comes. Raises RuntimeError, as PyTorch does, from the one on at which the card is lost."""
        self.number += 1
        self.operator = name
        if self.lost_at is not None and self.number >= self.lost_at:
            raise RuntimeError(f"card {self.index} is lost: nothing has answered since operator {self.number} ({name})")

    def count_copy(self, what: str) -> None:
        """Note a copy over the host's link. Raises RuntimeError for the one that is to fail."""
        self.counts.kernels[what] += 1
        self.copies += 1
        if self.copies == self.fail_copy:
            raise RuntimeError(f"card {self.index}: {what} number {self.copies} failed")

    def _sample(self) -> None:
        if self.recorder is not None:
            seconds = max(self.timeline.host_seconds, self.timeline.lanes[self.timeline.current].seconds)
            self.recorder.note(seconds, self.allocator.allocated, self.held)

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        held = ", ".join(f"{row} {show_bytes(size)}" for row, size in self.held.most_common() if size > 0)
        return torch.OutOfMemoryError(
            f"card {self.index}: operator {self.number} ({self.operator}) asked for {show_bytes(nbytes)}; of "
            f"{show_bytes(self.allocator.capacity)} {show_bytes(self.allocator.allocated)} are in use and "
            f"{show_bytes(self.allocator.reserved)} reserved. Held: {held}"
        )


class Simulation:
    """The cards of this process. `shapes`: no values, full size."""

    def __init__(
        self, cards: int = 1, capacity_bytes: int = 24 * 2**30, rates: CardRates | None = None, shapes: bool = False
    ):
        self.devices = [Device(n, capacity_bytes, rates or CardRates()) for n in range(cards)]
        self.shapes = shapes
        self.current = 0
        self.memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._pinned: dict[int, int] = {}  # storage's address -> bytes
        self.pinned_bytes = self.most_pinned_bytes = 0
        self.ranks = 1
        self.seed = 0

    @property
    def device(self) -> Device:
        return self.devices[self.current]

    def pin(self, tensor: torch.Tensor) -> None:
        """Count a host tensor as pinned until its storage goes."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        self._pinned[key] = nbytes
        self.pinned_bytes += nbytes
        self.most_pinned_bytes = max(self.most_pinned_bytes, self.pinned_bytes)
        weakref.finalize(tensor, self._unpin, key, nbytes)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def _unpin(self, key: int, nbytes: int) -> None:
        self._pinned.pop(key, None)
        self.pinned_bytes -= nbytes
