"""Collectives between simulated cards: values travel by gloo between processes; shapes alone travel nowhere.

A collective that is not asynchronous runs on the current stream; an asynchronous one on a stream of its own, and
`wait()` orders the current stream behind it, as NCCL's process group does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from tercet.rehearsal.card import Card, on_card, raws, simulation
from tercet.rehearsal.cost import collective_seconds
from tercet.rehearsal.device import Device
from tercet.rehearsal.timeline import EventMark

OWN_LANE = "collectives"


class CardWork(dist._Work):  # type: ignore[name-defined, misc]
    """An asynchronous collective: waiting orders the current stream behind it and does not stop the host."""

    def __init__(self, device: Device, mark: EventMark):
        super().__init__()
        self._device, self._mark = device, mark
        device.works.add(self)  # PyTorch keeps the C++ half alone, which would wait for ever

    def wait(self, timeout: Any = None) -> bool:
        timeline = self._device.timeline
        timeline.wait(timeline.lanes[timeline.current], self._mark)
        self._device.works.discard(self)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def collective(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cards = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Card)]
    device, name = cards[0]._memory.device, operator._schema.name.rpartition("::")[2]
    if name == "wait_tensor":
        return args[0]
    for card in cards:
        card._memory.ready()
    payload = max(card._raw.nbytes for card in cards)
    if name.startswith(("allgather", "_allgather", "all_gather")) and operator.namespace == "_c10d_functional":
        payload *= simulation().ranks
    device.counts.collectives[name] += 1
    device.counts.collective_bytes[name] += payload
    seconds = collective_seconds(device.rates, name, payload, simulation().ranks)
    if operator.namespace == "_c10d_functional":
        return _functional(operator, name, args, kwargs, cards, device, seconds)
    if not simulation().shapes:
        raw_args, raw_kwargs = raws(args, kwargs, cards)
        out = operator(*raw_args, **raw_kwargs)
        work = out[1] if isinstance(out, tuple | list) else out
        if work is not None:
            work.wait()
    mark = _queue(device, name, seconds, cards, bool(_argument(operator, args, kwargs, "async_op", True)))
    returned = CardWork(device, mark).boxed()
    returns = operator._schema.returns
    return returned if len(returns) == 1 else (args[0], returned)


def _argument(operator: Any, args: Any, kwargs: Any, name: str, default: Any) -> Any:
    for n, argument in enumerate(operator._schema.arguments):
        if argument.name in (name, "asyncOp"):
            return args[n] if n < len(args) else kwargs.get(argument.name, default)
    return default


def _queue(device: Device, name: str, seconds: float, cards: list[Card], asynchronous: bool) -> EventMark:
    timeline = device.timeline
    before = timeline.current
    if asynchronous:
        lane = next((x for x in timeline.lanes if x.name == OWN_LANE), None) or timeline.new_lane(OWN_LANE)
        timeline.wait(lane, timeline.mark(timeline.lanes[before]))
        timeline.current = lane.number
    use = timeline.launch(name, seconds, device.rates.launch)
    for card in cards:
        timeline.writes(card._memory.history, use, card)
        card._memory.recorded.add(use.lane)
    timeline.current = before
    return timeline.mark(timeline.lanes[use.lane])


def _functional(
    operator: Any, name: str, args: Any, kwargs: Any, cards: list[Card], device: Device, seconds: float
) -> Any:
    """Functional collectives (DTensor's): they return new tensors."""
    if simulation().shapes:
        source = cards[0]._raw
        if name.startswith("all_gather"):
            out: Any = source.new_empty(source.shape[0] * simulation().ranks, *source.shape[1:])
        elif name.startswith("reduce_scatter"):
            out = source.new_empty(source.shape[0] // simulation().ranks, *source.shape[1:])
        else:
            out = source.clone()
    else:
        raw_args, raw_kwargs = raws(args, kwargs, cards)
        out = operator(*raw_args, **raw_kwargs)
        out = tree_map(lambda x: torch.ops._c10d_functional.wait_tensor(x) if isinstance(x, torch.Tensor) else x, out)
    result = tree_map(lambda x: on_card(device, x) if isinstance(x, torch.Tensor) else x, out)
    _queue(device, name, seconds, cards, False)
    return result
