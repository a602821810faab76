"""Block inputs in host memory between forward and backward: what full recomputation keeps leaves the card.

Copies run on a stream of their own, beside the arithmetic. On the way out at most two inputs wait on the card; on the way
back each block's is fetched while the block after it runs backward. On a CPU host memory is all there is: inputs are
copied there like everywhere else, so that what is tested is what runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(eq=False)
class _Away:
    """A block's input in host memory. `left`, `back`: events of its two copies; `value`: it, on the device again."""

    host: Tensor
    left: Any = None
    back: Any = None
    value: Tensor | None = None


class InputsOnHost:
    def __init__(self, device: torch.device):
        self._device = device
        self._cards: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._side: Any = None if self._cards is None else self._cards.Stream(device=device)
        self._away: list[_Away] = []  # in the order of forward
        self._free: list[Tensor] = []  # host memory that is used again; pinning it anew would cost more than the copy

    def around(self, x: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which a checkpointed call keeps its input `x` on the host."""

        def pack(saved: Tensor) -> Tensor | _Away:
            own = saved.requires_grad and saved.dtype == x.dtype and saved.shape == x.shape
            return self._leave(saved.detach()) if own else saved

        def unpack(kept: Tensor | _Away) -> Tensor:
            return self._fetch(kept) if isinstance(kept, _Away) else kept

        return saved_tensors_hooks(pack, unpack)

    def begin(self) -> None:
        """Forget what an earlier forward left that no backward came for."""
        self._free += [away.host for away in self._away]
        self._away.clear()

    def held(self) -> list[Tensor]:
        return [*self._free, *(away.host for away in self._away)]

    def _leave(self, x: Tensor) -> _Away:
        away = _Away(self._buffer(x))
        if self._cards is None:
            away.host.copy_(x)
        else:
            self._side.wait_stream(self._cards.current_stream(self._device))
            with self._cards.stream(self._side):
                away.host.copy_(x, non_blocking=True)
            x.record_stream(self._side)
            away.left = self._side.record_event()
            if len(self._away) > 1:  # the arithmetic runs no further ahead than two inputs
                self._cards.current_stream(self._device).wait_event(self._away[-2].left)
        self._away.append(away)
        return away

    def _buffer(self, x: Tensor) -> Tensor:
        for n, host in enumerate(self._free):
            if host.shape == x.shape and host.dtype == x.dtype:
                return self._free.pop(n)
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self._cards is not None)

    def _bring(self, away: _Away) -> None:
        """Start the copy back, into memory of the current stream, behind what that stream has been given so far."""
        if self._cards is None:
            away.value = away.host.clone()
            return
        away.value = torch.empty(away.host.shape, dtype=away.host.dtype, device=self._device)
        self._side.wait_stream(self._cards.current_stream(self._device))
        with self._cards.stream(self._side):
            away.value.copy_(away.host, non_blocking=True)
        away.value.record_stream(self._side)
        away.back = self._side.record_event()

    def _fetch(self, away: _Away) -> Tensor:
        if away.value is None:
            self._bring(away)
        place = self._away.index(away)
        if place and self._cards is not None and self._away[place - 1].value is None:
            self._bring(self._away[place - 1])
        if self._cards is not None:
            self._cards.current_stream(self._device).wait_event(away.back)
        self._away.pop(place)
        self._free.append(away.host)  # written again on the same stream only, after this copy
        assert away.value is not None
        value, away.value = away.value, None
        return value
