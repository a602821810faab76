"""A card's side streams, by which copies run beside computing; on a CPU there are none and every copy is done at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Copier:
    """One side stream of a device. `copy` begins when what was queued before `reserve` is done."""

    def __init__(self, device: torch.device):
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = self._module.Stream(device=device) if self._module else None

    def now(self) -> Any:
        """Return an event that stands for all that is queued on the computing stream so far."""
        return self._module.current_stream().record_event() if self._module else None

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Queue a copy that runs after the event `after`; return the event of its end."""
        if self._module is None or self._stream is None:
            target.copy_(source)
            return None
        with self._module.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def await_here(self, event: Any) -> None:
        """Let what is queued next on the computing stream run after `event`; the host does not wait."""
        if self._module is not None and event is not None:
            self._module.current_stream().wait_event(event)
