"""Copies between host and card, and values that the host asks for.

A copy that does not block happens as late as the card may do it: one to the card at the first use there, one to the
host when the host next waits for the card, with NaN (or the lowest integer) standing there until then. A program that reads too
early, or changes a pinned buffer too early, gets wrong numbers here as it would on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tercet.rehearsal.card import META, NAME, Card, aten, compute, on_card, simulation, special
from tercet.rehearsal.device import Device


@special(aten._to_copy.default)
def _to_copy(operator: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    target = kwargs.get("device")
    kind = torch.device(target).type if target is not None else source.device.type
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
    if isinstance(source, Card) and kind == NAME:
        index = torch.device(target).index if target is not None else None
        if index is not None and index != source._memory.device.index:
            raise RuntimeError(f"cards have no peer access here: {source.device} to {target}")
        return compute(operator, (source,), options)
    if isinstance(source, Card):
        return _to_host(source, bool(kwargs.get("non_blocking")), options)
    sim = simulation()
    index = torch.device(cast(Any, target)).index
    device = sim.devices[sim.current if index is None else index]
    converted = source if kwargs.get("dtype") in (None, source.dtype) else source.to(kwargs["dtype"])
    card = on_card(device, _blank(converted))
    _from_host(device, card, converted, bool(kwargs.get("non_blocking")))
    return card


@special(aten.copy_.default)
def _copy(operator: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if isinstance(target, Card) and isinstance(source, Card):
        return compute(operator, (target, source), {})
    if isinstance(target, Card):
        _from_host(target._memory.device, target, source, not blocks)
        return target
    _into_host(source, target, not blocks)
    return target


@special(aten._local_scalar_dense.default)
def _item(operator: Any, args: Any, kwargs: Any) -> Any:
    card = args[0]
    _wait(card._memory.device, "item")
    card._memory.ready()
    if card._raw.is_meta:
        return 1.0 if card.dtype.is_floating_point else True if card.dtype == torch.bool else 1
    return card._raw.item()


@special(aten.equal.default)
def _equal(operator: Any, args: Any, kwargs: Any) -> bool:
    _wait(args[0]._memory.device, "equal")
    a, b = (x._raw for x in args)
    return bool(a.is_meta or b.is_meta or torch.equal(a, b))


def _blank(like: Tensor) -> Tensor:
    """Return new memory for what comes from the host: without values in shapes mode, but for integers."""
    shapes = simulation().shapes and (like.dtype.is_floating_point or like.is_meta)
    return torch.empty_like(like, device=META if shapes else "cpu", memory_format=torch.preserve_format)


def _from_host(device: Device, target: Card, source: Tensor, asked_non_blocking: bool) -> None:
    pinned = source.is_pinned()
    if asked_non_blocking and not pinned:
        device.counts.unpinned_copies += 1
    lazy = asked_non_blocking and pinned
    _transfer(device, target, "copy to card", target._raw.nbytes / device.rates.to_card, writes=True)
    device.counts.bytes_to_card += target._raw.nbytes
    if not lazy:
        _wait(device, "blocking copy", blocking=True)
    if target._raw.is_meta or source.is_meta:
        return
    raw = target._raw
    if lazy:
        target._memory.pending.append(partial(_arrive, _on_their_way(device, source), raw, source))
    else:
        raw.copy_(source)


def _on_their_way(device: Device, host: Tensor) -> list[Callable[[], Any]]:
    """Return the copies into this host memory that the current stream has ordered before what comes on it now."""
    place, lane = host.untyped_storage().data_ptr(), device.timeline.current
    return [copy for number, _, copy, where in device.owed if number == lane and where == place]


def _arrive(first: list[Callable[[], Any]], raw: Tensor, source: Tensor) -> None:
    for copy in first:
        copy()
    raw.copy_(source)


def _to_host(source: Card, asked_non_blocking: bool, options: dict[str, Any]) -> Tensor:
    dtype = options.get("dtype") or source.dtype
    if source._raw.is_meta:
        host = torch.ones((), dtype=dtype).expand(source.shape)  # one value, however large: full size is not held here
    else:
        host = torch.empty_like(source._raw, dtype=dtype)
    _into_host(source, host, asked_non_blocking)
    return host


def _into_host(source: Card, host: Tensor, asked_non_blocking: bool) -> None:
    device = source._memory.device
    if source._memory.pending:
        source._memory.ready()
    device.counts.bytes_to_host += source._raw.nbytes
    lazy = asked_non_blocking and (host.is_pinned() or True)
    _transfer(device, source, "copy to host", source._raw.nbytes / device.rates.to_host, writes=False)
    if source._raw.is_meta:
        if not lazy:
            _wait(device, "blocking copy", blocking=True)
        return
    if not lazy:
        _wait(device, "blocking copy", blocking=True)
        host.copy_(source._raw)
        return
    value = source._raw.clone()
    host.fill_(float("nan") if host.dtype.is_floating_point else _lowest(host.dtype))
    lane = device.timeline.lanes[device.timeline.current]
    place = host.untyped_storage().data_ptr()
    device.owed.append((lane.number, lane.count, lambda: host.copy_(value), place))


def _lowest(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _transfer(device: Device, card: Card, what: str, seconds: float, writes: bool) -> None:
    device.count_copy(what)
    use = device.timeline.launch(what, seconds, device.rates.launch)
    (device.timeline.writes if writes else device.timeline.reads)(card._memory.history, use, card)


def _wait(device: Device, what: str, blocking: bool = False) -> None:
    """The host waits for the current stream."""
    device.counts.host_waits[what] += 1
    if blocking:
        device.counts.blocking_copies += 1
    timeline = device.timeline
    timeline.host_waits(timeline.mark(timeline.lanes[timeline.current]))
    device.settle()
