"""Data parallel: every rank holds everything; gradients are summed once per optimizer step. Also the one rank alone.

Gradients live in one flat fp32 buffer that parameters' `.grad` are views of, whatever type the weights have: sums
over micro-batches and ranks are fp32 sums. The buffer is cut into buckets; each is sent as soon as the last
micro-batch's backward has filled it, in a fixed order, so communication hides behind the rest of backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.model.adapter import named_parameters
from tercet.model.quantized import NF4Linear
from tercet.parallel.layout import Layout
from tercet.parallel.parameter_shard import ParameterShard
from tercet.parallel.precision import Precision
from tercet.parallel.world import World
from tercet.spec.axes.data import buckets
from tercet.spec.mesh import AXES, TOKENS
from tercet.spec.model import Model
from tercet.spec.placement import region


class Replicated(Layout):
    """Layout of zero 0. Build on a module that holds the kept values (fp32, or bf16 without masters) on the device.

    With `masters`, fp32 values in host memory by name, the module holds what computes alone. Masters, their moments
    and a copy of the gradients then stay on the host: after the last micro-batch the summed gradients go there, the
    optimizer works there, and the new weights come back.
    """

    copied_along = AXES  # ranks that differ along these axes hold the same parts

    def __init__(
        self,
        module: nn.Module,
        spec: Model,
        world: World,
        precision: Precision,
        masters: dict[str, Tensor] | None = None,
    ):
        self.module, self.world = module, world
        self._sums = world.mesh.size(TOKENS) > 1
        self._frozen, self._parameters = split_parameters(module)
        self._base = spec.frozen
        descriptions = {t.name: t for t in spec.tensors()}
        self.parts = []
        for name, parameter in self._parameters.items():
            value = parameter.detach() if masters is None else masters[name]
            if masters is None and precision.has_master:
                parameter.data = parameter.detach().to(precision.compute)
            self.parts.append(ParameterShard(descriptions[name], region(value.shape[0], 1, 0), value))
        self.on_host = masters is not None
        self._has_master = precision.has_master or self.on_host
        self._attach_gradients()
        self._host_gradients = _host_memory(self._flat.shape, world).zero_() if self.on_host else self._flat

    def _attach_gradients(self) -> None:
        # Backward fills the head first and the embedding last: the buffer follows, so buckets fill in order.
        order = list(self._parameters.values())[::-1]
        self._flat = torch.zeros(sum(p.numel() for p in order), dtype=torch.float32, device=self.world.device)
        self._buckets = [slice(a, b) for a, b in buckets([p.numel() for p in order])]
        self._waiting = [0] * len(self._buckets)
        self._bucket_of: dict[Tensor, int] = {}
        offset = 0
        for p in order:
            view = self._flat[offset : offset + p.numel()].view_as(p)
            accumulate_in(p, view)
            self._bucket_of[p] = next(n for n, b in enumerate(self._buckets) if b.start <= offset < b.stop)
            offset += p.numel()
            p.register_post_accumulate_grad_hook(self._filled)
        self._views = {name: cast(Tensor, p.grad) for name, p in self._parameters.items()}
        self._sending: list[dist.Work] = []
        self._next = 0
        self._last = False

    def begin_step(self) -> None:
        self._flat.zero_()
        self._next = 0

    def begin_micro_batch(self, last: bool) -> None:
        self._last = last and self._sums
        for n in range(len(self._buckets)):
            self._waiting[n] = 0
        for p in self._parameters.values():
            self._waiting[self._bucket_of[p]] += 1

    def _filled(self, parameter: Tensor) -> None:
        if self._last:
            self._waiting[self._bucket_of[parameter]] -= 1
            self._send_ready(all_of_them=False)

    def _send_ready(self, all_of_them: bool) -> None:
        # In order only: ranks may fill buckets in different orders, and collectives must not cross.
        while self._next < len(self._buckets) and (all_of_them or self._waiting[self._next] == 0):
            bucket = self._flat[self._buckets[self._next]]
            work = dist.all_reduce(bucket, group=self.world.group(TOKENS), async_op=True)
            self._sending.append(cast(dist.Work, work))
            self._next += 1

    def finish_gradients(self) -> None:
        """Wait until every part's `value.grad` is the sum over all ranks."""
        if self._sums:
            self._send_ready(all_of_them=True)
            for work in self._sending:
                work.wait()
            self._sending.clear()
        if not self.on_host:
            for part in self.parts:
                part.value.grad = self._views[part.name]
            return
        self._host_gradients.copy_(self._flat)
        for part in self.parts:
            view = self._views[part.name]
            begin = int(view.storage_offset())
            part.value.grad = self._host_gradients[begin : begin + view.numel()].view_as(view)

    def after_update(self) -> None:
        """Bring the updated masters into the weights that compute."""
        if self._has_master:
            with torch.no_grad():
                torch._foreach_copy_(list(self._parameters.values()), [p.value for p in self.parts])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 parameter)."""
        for part in self.parts:
            yield part.name, part.value.float()
        for name, parameter in self._frozen.items() if not self._base else ():
            yield name, parameter.detach().float()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank holds now, by ledger row."""
        weights = [p.detach() for p in self._parameters.values()]
        weights += [p.detach() for p in self._frozen.values()] + packed_scales(self.module)
        master = [p.value for p in self.parts] if self._has_master else []
        if self.on_host:
            there = {"states": master, "pinned": [self._host_gradients]}
            return {"weights": weights, "master": [], "gradients": [self._flat], **there}
        return {"weights": weights, "master": master, "gradients": [self._flat]}


def split_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return (frozen, trained) parameters by the description's names."""
    both: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = ({}, {})
    for name, parameter in named_parameters(module):
        both[parameter.requires_grad][name] = parameter
    return both


def packed_scales(module: nn.Module) -> list[Tensor]:
    """Return what layers in nf4 hold beside their packed values."""
    return [buffer for m in module.modules() if isinstance(m, NF4Linear) for buffer in m.buffers(recurse=False)]


def pinned(tensor: Tensor, world: World) -> Tensor:
    """Return an fp32 copy in host memory, pinned when there is a card: copies then run at the link's full speed."""
    return _host_memory(tensor.shape, world).copy_(tensor)


def _host_memory(shape: torch.Size, world: World) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, pin_memory=world.device.type == "cuda")


def accumulate_in(parameter: Tensor, buffer: Tensor) -> None:
    """Make backward add into the fp32 buffer, whatever type the parameter has."""
    if parameter.dtype == buffer.dtype:
        parameter.grad = buffer
        return
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = buffer.dtype
        parameter.grad = buffer
        return
    raise RuntimeError("bf16 weights with fp32 gradients need torch 2.11 or newer (Tensor.grad_dtype)")
