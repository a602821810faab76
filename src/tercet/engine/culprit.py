"""Whose gradient was not finite: each one is looked at where backward makes it, before anything is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tercet.engine import Culprit, MicroBatch


def _sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")  # a DTensor; importing that type takes a second, and only shards need it


class GradientWatch:
    """Looks at the gradients of a module's parameters while micro-batches run through it.

    Under FSDP2 what backward fills are gathered parameters, which exist once their part of the module begins: every
    part is asked when it does. The hooks see a rank's own gradient of one micro-batch, whatever is summed later.
    """

    def __init__(self, module: nn.Module):
        self.found: list[tuple[str, int]] = []  # (parameter, micro-batch), in the order of backward
        self.micro_batch = 0  # that runs now
        self.poisoned: str | None = None  # this parameter's gradient is made NaN
        self._module = module
        self._watched: set[int] = set()
        self._hooks: list[Any] = []

    @contextmanager
    def looking(self) -> Iterator[GradientWatch]:
        try:
            for prefix, part in self._module.named_modules():
                self._hooks.append(part.register_forward_pre_hook(self._begins(prefix)))
            self._watch("", self._module)
            yield self
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _begins(self, prefix: str) -> Callable[[nn.Module, Any], None]:
        return lambda part, _: self._watch(f"{prefix}." if prefix else "", part)

    def _watch(self, prefix: str, part: nn.Module) -> None:
        for name, parameter in part.named_parameters(prefix.removesuffix(".")):
            if parameter.requires_grad and id(parameter) not in self._watched and not _sharded(parameter):
                self._watched.add(id(parameter))
                self._hooks.append(parameter.register_hook(self._look_at(name)))

    def _look_at(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def look(gradient: Tensor) -> Tensor | None:
            if not finite(gradient):
                self.found.append((name, self.micro_batch))
            return gradient * torch.nan if name == self.poisoned else None

        return look


def finite(gradient: Tensor) -> bool:
    """Return whether all elements are; without a second tensor of that size, which a full card has no room for."""
    if gradient.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(gradient.detach())).isfinite().all())


def culprits(found: Sequence[tuple[str, int]], micro_batches: Sequence[MicroBatch]) -> list[Culprit]:
    """Return one culprit for each micro-batch: what became wrong first in its backward, and how much followed."""
    by_batch: dict[int, list[str]] = {}
    for name, n in found:
        by_batch.setdefault(n, []).append(name)
    return [
        Culprit(names[0], len(names) - 1, [row for row in micro_batches[n].rows if row >= 0])
        for n, names in by_batch.items()
    ]


def one_by_one(batch: Any) -> list[MicroBatch]:
    """Return a batch's rows (B, T) as batches (1, T) each."""
    if len(batch.rows) < 2:
        return [batch]
    length, found = batch.input_ids.shape[1], []
    for n, row in enumerate(batch.rows):
        borders = batch.documents - n * length
        named = {name: getattr(batch, name) for name in ("input_ids", "labels", "positions", "weights")}
        alone = {name: None if tensor is None else tensor[n : n + 1] for name, tensor in named.items()}
        within = borders[(borders >= 0) & (borders <= length)]
        found.append(replace(batch, **alone, documents=within, rows=[row]))
    return found
