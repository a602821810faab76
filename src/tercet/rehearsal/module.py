"""What PyTorch and FSDP2 ask of a device's module (`torch.cuda`'s counterpart): streams, events, memory statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tercet.rehearsal.card import NAME, _Installed, simulation
from tercet.rehearsal.device import Device
from tercet.rehearsal.timeline import EventMark, Lane


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._mark: EventMark | None = None
        self._device: Device | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._device = stream.owner
        self._mark = stream.owner.timeline.mark(stream.lane)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True if self._mark is None or self._device is None else self._device.timeline.host_knows(self._mark)

    def synchronize(self) -> None:
        if self._mark is not None and self._device is not None:
            self._device.counts.host_waits["event"] += 1
            self._device.timeline.host_waits(self._mark)
            self._device.settle()

    @property
    def seconds(self) -> float:
        """When what it stands for ends, on the simulated clock."""
        return self._mark.seconds if self._mark is not None else 0.0

    def elapsed_time(self, end: Event) -> float:
        assert self._mark is not None and end._mark is not None
        return 1000 * (end._mark.seconds - self._mark.seconds)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, lane: Lane | None = None, **ignored: Any):
        self.owner = _device(device)
        self.lane = lane or self.owner.timeline.new_lane(f"stream {len(self.owner.timeline.lanes)}")
        self.priority = priority

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, self.owner.index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return id(self.lane)

    def wait_event(self, event: Event) -> None:
        if event._mark is not None:
            self.owner.timeline.wait(self.lane, event._mark)

    def wait_stream(self, other: Stream) -> None:
        self.owner.timeline.wait(self.lane, other.owner.timeline.mark(other.lane))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.owner.counts.host_waits["stream"] += 1
        self.owner.timeline.host_waits(self.owner.timeline.mark(self.lane))
        self.owner.settle()

    def query(self) -> bool:
        return self.owner.timeline.host_knows(self.owner.timeline.mark(self.lane))

    def __enter__(self) -> Stream:
        self._before = self.owner.timeline.current
        self.owner.timeline.current = self.lane.number
        return self

    def __exit__(self, *error: Any) -> None:
        self.owner.timeline.current = self._before


def _device(device: Any = None) -> Device:
    sim = simulation()
    if device is None:
        return sim.device
    index = device if isinstance(device, int) else torch.device(device).index
    return sim.devices[sim.current if index is None else index]


def current_stream(device: Any = None) -> Stream:
    owner = _device(device)
    return Stream(owner.index, lane=owner.timeline.lanes[owner.timeline.current])


def default_stream(device: Any = None) -> Stream:
    owner = _device(device)
    return Stream(owner.index, lane=owner.timeline.lanes[0])


@contextmanager
def stream(wanted: Stream | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    with wanted:
        yield


def set_stream(wanted: Stream) -> None:
    wanted.owner.timeline.current = wanted.lane.number


def synchronize(device: Any = None) -> None:
    owner = _device(device)
    owner.counts.host_waits["synchronize"] += 1
    owner.timeline.host_waits_for_all()
    owner.settle()


def host_register(memory: torch.Tensor) -> None:
    """Pin host memory where it lies."""
    simulation().pin(memory)


def is_available() -> bool:
    return _Installed.simulation is not None


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return len(_Installed.simulation.devices) if _Installed.simulation is not None else 0


def current_device() -> int:
    return _Installed.simulation.current if _Installed.simulation is not None else 0


def set_device(device: Any) -> None:
    simulation().current = _device(device).index


class device:
    """`with torch.card.device(n)`: the current card."""

    def __init__(self, wanted: Any):
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = simulation().current
        if self._wanted is not None and not (isinstance(self._wanted, int) and self._wanted < 0):
            set_device(self._wanted)

    def __exit__(self, *error: Any) -> None:
        simulation().current = self._before


def manual_seed(seed: int) -> None:
    """Random numbers of the card are the CPU's here, which torch.manual_seed has seeded."""


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def memory_allocated(device: Any = None) -> int:
    return _device(device).allocator.allocated


def max_memory_allocated(device: Any = None) -> int:
    return _device(device).allocator.peak_allocated


def memory_reserved(device: Any = None) -> int:
    return _device(device).allocator.reserved


def max_memory_reserved(device: Any = None) -> int:
    return _device(device).allocator.peak_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    _device(device).allocator.reset_peaks()


def empty_cache() -> None:
    simulation().device.allocator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    allocator = _device(device).allocator
    return allocator.capacity - allocator.reserved, allocator.capacity
