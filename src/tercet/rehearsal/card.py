"""A graphics card written in Python: tensors of device "card", whose operators run on the CPU and are watched.

A tensor on a card wraps a CPU tensor (values) or a meta tensor (shapes only). In shapes mode integers and booleans keep
their values, so that token ids, labels, document borders and routing stay real; floating-point numbers are shapes only,
and where a program asks for one it gets 1. Every operator is checked (one device, order of streams), its memory
comes from the card's allocator, and its time from the card's figures.

Stands on PyTorch's Python backends (torch.utils.backend_registration, 2.13, marked experimental there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tercet.rehearsal import kernels
from tercet.rehearsal.cost import flops, operator_seconds
from tercet.rehearsal.device import Device, Memory, Simulation

NAME = "card"
aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")


class _Installed:
    """The one simulation of this process: a device is global by nature."""

    simulation: Simulation | None = None


def simulation() -> Simulation:
    assert _Installed.simulation is not None, "no simulated card is installed"
    return _Installed.simulation


class Card(Tensor):
    """A tensor on a simulated card. `_raw`: what stands behind it; `_memory`: the card memory that it lies in."""

    _raw: Tensor
    _memory: Memory

    @staticmethod
    def __new__(cls, raw: Tensor, memory: Memory) -> Card:
        card = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, memory.device.index),
        )
        card._raw, card._memory = raw, memory
        return card

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Card({self._memory.device.index}, {tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Tensor:
        return Card(self._raw, self._memory)

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, Card):
            self._raw, self._memory = value._raw, value._memory

    def untyped_storage(self) -> CardStorage:  # type: ignore[override]
        return CardStorage(self)

    def data_ptr(self) -> int:
        return self._raw.untyped_storage()._cdata + self._raw.storage_offset() * self._raw.element_size()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor on a card to numpy; use Tensor.cpu() first")
        return self.cpu().numpy()

    def record_stream(self, stream: Any) -> None:
        self._memory.recorded.add(stream.lane.number)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operator, args, kwargs or {})


class CardStorage:
    """What a program may ask of the storage of a tensor on a card: its size, and to give it up or take it again."""

    def __init__(self, card: Card):
        self._card = card

    @property
    def _cdata(self) -> int:
        return self._card._raw.untyped_storage()._cdata

    @property
    def device(self) -> torch.device:
        return self._card.device

    def data_ptr(self) -> int:
        return self._cdata if self.size() else 0

    def size(self) -> int:
        return self._card._raw.untyped_storage().size()

    nbytes = size

    def __len__(self) -> int:
        return self.size()

    def resize_(self, nbytes: int) -> None:
        memory, storage = self._card._memory, self._card._raw.untyped_storage()
        if nbytes == storage.size():
            return
        memory.device.give_back(memory)
        storage.resize_(nbytes)
        if nbytes:
            memory.device.take_again(memory, nbytes)


# ------------------------------------------------------------------------------------------------- schemas


@cache
def _written(operator: Any) -> tuple[tuple[int | str, ...], bool]:
    """Return which arguments an operator writes (positions, and names of keyword ones), and whether it only views."""
    schema, written = operator._schema, []
    for n, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else n)
    returns = schema.returns
    view = not written and bool(returns) and all(r.alias_info is not None for r in returns)
    return tuple(written), view


# ----------------------------------------------------------------------------------------------- dispatching

SPECIAL: dict[Any, Callable[..., Any]] = {}


def special(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SPECIAL.update(dict.fromkeys(operators, function))
        return function

    return register


def dispatch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = SPECIAL.get(operator)
    if found is not None:
        return found(operator, args, kwargs)
    if operator.namespace in ("c10d", "_c10d_functional"):
        from tercet.rehearsal.collectives import collective

        return collective(operator, args, kwargs)
    return compute(operator, args, kwargs)


def compute(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None = None
) -> Any:
    """Run an operator on what stands behind its tensors; `function` does instead what the operator's kernel would."""
    cards, others = _tensors(args, kwargs)
    device = _device_of(operator, cards, others, args, kwargs)
    device.count_operator(operator.name())
    for card in cards:
        if card._memory.pending:
            card._memory.ready()
    written, view = _written(operator)
    targets = _targets(args, kwargs, written) if written else []
    known = _remembered(operator, args, kwargs, cards, others, targets) if not view and function is None else None
    out, operations = known or _run(operator, args, kwargs, cards, function)
    result = _wrap(device, out, targets)
    if not view:
        _account(operator, device, operations, cards, targets, result)
    return result if operator._schema.returns else None


def _run(
    operator: Any, args: Any, kwargs: Any, cards: list[Card], function: Callable[..., Any] | None
) -> tuple[Any, float]:
    """Return (what stands behind the result, floating-point operations)."""
    run = function or cast(Callable[..., Any], kernels.STAND_INS.get(operator, operator))
    raw_args, raw_kwargs = raws(args, kwargs, cards)
    out = run(*raw_args, **raw_kwargs)
    return out, flops(operator, raw_args, raw_kwargs, out)


def _tensors(args: Any, kwargs: Any) -> tuple[list[Card], list[Tensor]]:
    """Return the tensors on cards and the other ones among an operator's arguments."""
    cards: list[Card] = []
    others: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        for y in x if isinstance(x, list | tuple) else (x,):
            if isinstance(y, Card):
                cards.append(y)
            elif isinstance(y, Tensor):
                others.append(y)
    return cards, others


# Shapes only: what an operator returned for these shapes once, it returns again. Many of PyTorch's shape functions are
# Python, and a step repeats the same few hundred calls thousands of times.
_answers: dict[Any, tuple[Any, float]] = {}


def _remembered(
    operator: Any, args: Any, kwargs: Any, cards: list[Card], others: list[Tensor], targets: list[Card]
) -> tuple[Any, float] | None:
    if not cards or others or not all(card._raw.is_meta for card in cards) or operator in kernels.STAND_INS:
        return None
    key = (operator, _key(args), _key(tuple(kwargs.items())))
    try:
        found = _answers.get(key)
    except TypeError:  # an argument that cannot be a key
        return None
    if found is None:
        out, operations = _run(operator, args, kwargs, cards, None)
        leaves = tree_leaves(out)
        if all(x is None or (isinstance(x, Tensor) and x.is_meta) for x in leaves):
            _answers[key] = (tree_map(_form, out) if not targets else None, operations)
        return out, operations
    form, operations = found
    if targets:
        return (targets[0]._raw if len(targets) == 1 else None), operations
    return tree_map(_unform, form, is_leaf=lambda x: isinstance(x, _Form)), operations


@dataclass(frozen=True)
class _Form:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _form(x: Any) -> Any:
    return _Form(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _unform(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=META) if isinstance(x, _Form) else x


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (x.shape, x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return tuple(_key(y) for y in x)
    return (type(x), x) if isinstance(x, bool | int | float) else x


def _device_of(operator: Any, cards: list[Card], others: list[Tensor], args: Any, kwargs: Any) -> Device:
    """Return the one card of an operator. Raises RuntimeError as PyTorch does when tensors lie on two devices."""
    device = cards[0]._memory.device if cards else None
    if any(card._memory.device is not device for card in cards):
        places = {card.device for card in cards}
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {operator} got {sorted(map(str, places))}"
        )
    for x in others:
        if x.dim() > 0 and x.device.type == "cpu" and cards:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {operator} got cpu (shape {tuple(x.shape)}) and "
                f"{cards[0].device}"
            )
    if device is not None:
        return device
    index = next((x.index for x in (*args, *kwargs.values()) if isinstance(x, torch.device) and x.type == NAME), None)
    sim = simulation()
    return sim.devices[sim.current if index is None else index]


def raws(args: Any, kwargs: Any, cards: list[Card]) -> tuple[Any, Any]:
    """Return the arguments with what stands behind the cards: all on the CPU, or all on meta where one has no value."""
    meta = any(card._raw.is_meta for card in cards)

    def raw(x: Any) -> Any:
        if isinstance(x, Card):
            if meta and not x._raw.is_meta:
                return x._raw.to(META)
            return x._raw
        if isinstance(x, torch.device) and x.type == NAME:
            return META if simulation().shapes and meta else CPU
        if meta and isinstance(x, Tensor) and not x.is_meta:
            return x.to(META)
        return x

    def each(x: Any) -> Any:
        return type(x)(raw(y) for y in x) if type(x) in (list, tuple) else raw(x)

    return tuple(each(x) for x in args), {k: each(x) for k, x in kwargs.items()}


def _targets(args: Any, kwargs: Any, written: tuple[int | str, ...]) -> list[Card]:
    found: list[Card] = []
    for w in written:
        x = kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None
        found += [y for y in (x if isinstance(x, list | tuple) else (x,)) if isinstance(y, Card)]
    return found


def _wrap(device: Device, out: Any, targets: list[Card]) -> Any:
    """Return an operator's results as tensors of the card; what it wrote in place is returned as it came in."""
    if targets and isinstance(out, Tensor):
        lost = targets[0]
        if out.is_meta and not lost._raw.is_meta:  # a value that is no longer known
            lost._raw = out
            simulation().memories[out.untyped_storage()._cdata] = lost._memory
            lost._memory.storages.append(out.untyped_storage())
        if len(targets) == 1:
            return lost
    known = {id(card._raw): card for card in targets}

    def wrap(x: Any) -> Any:
        if isinstance(x, Tensor):
            return known.get(id(x)) or on_card(device, x)
        return type(x)(wrap(y) for y in x) if type(x) in (list, tuple) else x

    return wrap(out)


def on_card(device: Device, raw: Tensor) -> Card:
    """Return a tensor of the card around `raw`: in the memory of the storage that it shares, or in new memory."""
    storage = raw.untyped_storage()
    memories = simulation().memories
    memory = memories.get(storage._cdata)
    if memory is None:
        memory = device.take(storage.nbytes(), storage)
        memories[storage._cdata] = memory
    return Card(raw, memory)


def _account(
    operator: Any, device: Device, operations: float, cards: list[Card], targets: list[Card], result: Any
) -> None:
    """Queue the operator's work on the current stream: its time, what it reads and what it writes."""
    outs = [x for x in (result if isinstance(result, list | tuple) else (result,)) if isinstance(x, Card)]
    new = [o for o in outs if not any(o is t for t in targets)]
    moved = sum(card._raw.nbytes for card in cards) + sum(o._raw.nbytes for o in new)
    dtype = next((c.dtype for c in cards if c.dtype.is_floating_point), torch.float32)
    name = operator.name()
    device.counts.kernels[name] += 1
    timeline = device.timeline
    use = timeline.launch(name, operator_seconds(device.rates, operations, moved, dtype), device.rates.launch)
    changed = {id(card._memory): card for card in (*targets, *new)}
    for card in cards:
        if id(card._memory) not in changed:
            timeline.reads(card._memory.history, use, card)
    for card in changed.values():
        timeline.writes(card._memory.history, use, card)
