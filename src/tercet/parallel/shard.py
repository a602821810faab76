"""Sharded data parallel (ZeRO 1, 2, 3; Rajbhandari et al. 2019, arXiv 1910.02054) through PyTorch's FSDP2.

Every parameter is cut along its first dimension, in fp32; what is computed with is gathered from the shards.

| zero | weights gathered | gradients |
|---|---|---|
| 1 | once per step, kept through all micro-batches | summed whole on each rank, reduced once per step |
| 2 | once per step, kept through all micro-batches | reduced to shards after every micro-batch |
| 3 | layer by layer, forward and backward | reduced to shards after every micro-batch |

`reduce_gradients: once_per_step` makes 2 and 3 treat gradients as 1 does: less communication, more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tercet.parallel.data import packed_scales, split_parameters
from tercet.parallel.layout import Layout
from tercet.parallel.mesh import device_mesh
from tercet.parallel.parameter_shard import ParameterShard
from tercet.parallel.precision import Precision
from tercet.parallel.room import free_bytes
from tercet.parallel.world import World
from tercet.spec.mesh import AXES
from tercet.spec.model import Model
from tercet.spec.placement import region
from tercet.spec.strategy import Strategy


def on_host(strategy: Strategy) -> bool:
    """Whether the fp32 shards live in host memory. FSDP2 holds them once, so optimizer and weights go together."""
    return strategy.offload_optimizer != "none" or strategy.offload_weights != "none"


class Sharder:
    """Shards a module piece by piece while it is being built, so that no rank ever holds it whole."""

    def __init__(self, world: World, precision: Precision, strategy: Strategy):
        self.options = {
            "mesh": device_mesh(world, "shard"),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=precision.compute if precision.has_master else None,
                reduce_dtype=torch.float32,
                # What goes into a block has the type that the block wants: rotary tables may be fp32 on purpose.
                cast_forward_inputs=False,
            ),
            "reshard_after_forward": strategy.zero == 3,
        }
        self._cuts_frozen = strategy.zero == 3
        if on_host(strategy):
            # Shards, their gradients and the optimizer live in host memory; each gather uploads this rank's shard.
            self.options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")

    def shard(self, module: nn.Module) -> None:
        """Shard what the module holds and no earlier call has sharded; its values must be in place: what is trained in
        fp32, what is frozen in the format that computes. Frozen weights are whole on every rank but under zero 3.
        """
        whole = {p for p in module.parameters() if not p.requires_grad} if not self._cuts_frozen else None
        fully_shard(module, **self.options, ignored_params=whole)


class Sharded(Layout):
    """Layout of zero 1, 2, 3 over a module whose layers and root are sharded."""

    copied_along = tuple(
        axis for axis in AXES if axis != "shard"
    )  # ranks that differ along these axes hold the same parts

    def __init__(self, module: Any, spec: Model, world: World, precision: Precision, strategy: Strategy):
        self.module, self.world = module, world
        self._has_master, self._compute = precision.has_master, precision.compute
        self.on_host = on_host(strategy)
        self._keep_weights = strategy.zero < 3
        self._reduce_once = strategy.reduce_gradients == "once_per_step"
        # A sum over ranks, not FSDP2's average: the loss is divided by the global token count already. Both calls
        # are needed on every module; gloo has no reduction that divides on the way.
        for m in self._fsdp_modules():
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
        self._frozen, trained = split_parameters(module)
        self._base = spec.frozen
        self._parameters: dict[str, DTensor] = trained  # type: ignore[assignment]
        descriptions = {t.name: t for t in spec.tensors()}
        self.parts = []
        shard = world.mesh.position(world.rank)["shard"]
        # Without masters FSDP2 would hold gradients in the weights' own bf16 and add micro-batches up in it.
        self._sums: dict[str, Tensor] = {}
        self._own_sums = precision.kept != torch.float32
        for name, parameter in self._parameters.items():
            if self._own_sums:
                parameter.register_post_accumulate_grad_hook(partial(self._add_up, name))
            rows = region(parameter.shape[0], world.mesh.shard, shard)
            if rows.rows:
                self.parts.append(ParameterShard(descriptions[name], rows, parameter.to_local().detach()))

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def begin_micro_batch(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(last or not self._reduce_once)
        if self._keep_weights:
            self.module.set_reshard_after_backward(last)

    def _add_up(self, name: str, parameter: Tensor) -> None:
        """Take a micro-batch's reduced gradient over into this rank's fp32 sum."""
        assert isinstance(parameter.grad, DTensor)
        found, parameter.grad = parameter.grad.to_local(), None
        if name in self._sums:
            self._sums[name] += found
        else:
            self._sums[name] = found.float()

    def finish_gradients(self) -> None:
        for part in self.parts:
            if self._own_sums:
                part.value.grad = self._sums.get(part.name)
                continue
            grad = self._parameters[part.name].grad
            part.value.grad = None if grad is None else grad.to_local()  # type: ignore[union-attr]

    def end_step(self) -> None:
        """Drop the gradients: between steps only weights and optimizer are held."""
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        for part in self.parts:
            part.value.grad = None

    def begin_evaluation(self) -> None:
        """Keep what forwards gather, where every rank has room for the whole of it: else each token gathers anew."""
        if not self._keep_weights:
            whole = sum(p.numel() for p in self._parameters.values()) * self._compute.itemsize
            whole += sum(p.numel() * p.element_size() for p in self._frozen.values())
            room = free_bytes(self.world.device, self.world.size)
            self._keep_gathered(not self.world.any(room < 1.25 * whole))

    def end_evaluation(self) -> None:
        """Give the gathered weights back: without a backward nothing else does."""
        self._keep_gathered(self._keep_weights)
        for m in self._fsdp_modules():
            m.reshard()

    def _keep_gathered(self, keep: bool) -> None:
        for m in self._fsdp_modules():
            m.set_reshard_after_forward(not keep, recurse=False)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 parameter), gathered one at a time; every rank must run through all of them."""
        for name, parameter in self._parameters.items():
            yield name, parameter.full_tensor().float()
        for name, parameter in self._frozen.items() if not self._base else ():
            yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()).float()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank holds now, by ledger row."""
        rows: dict[str, list[Tensor]] = {"weights": [], "master": [], "gradients": [], "states": [], "pinned": []}
        shards = "states" if self.on_host else "master" if self._has_master else "weights"
        rows[shards] += [p.to_local() for p in self._parameters.values()]
        rows["weights"] += [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self._frozen.values()]
        rows["weights"] += packed_scales(self.module)
        gradients = [p.grad for p in self._parameters.values()]
        rows["pinned" if self.on_host else "gradients"] += [g.to_local() for g in gradients if isinstance(g, DTensor)]
        rows["gradients"] += self._sums.values()
        gathered = _gathered(self._fsdp_modules())
        if gathered is None:  # not measured: a row without it would be wrong, one that is missing is unknown
            del rows["weights"], rows["gradients"]
            return rows
        for row, tensors in gathered.items():
            rows[row] += tensors
        return rows


def _gathered(modules: list[FSDPModule]) -> dict[str, list[Tensor]] | None:
    """Return the gathered weights and whole gradients that FSDP2 holds now; None where its private names are others.

    Used to measure, never to change anything.
    """
    rows: dict[str, list[Tensor]] = {"weights": [], "gradients": []}
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

        for module in modules:
            state = module._get_fsdp_state()
            # One group before torch 2.12.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
                whole = getattr(parameter, "_unsharded_param", None)  # its gradient may outlive its values
                if whole is not None:
                    rows["weights"] += [whole.detach()] if parameter.sharded_state == ShardedState.UNSHARDED else []
                    rows["gradients"] += [whole.grad] if whole.grad is not None else []
                if parameter.unsharded_accumulated_grad is not None:
                    rows["gradients"].append(parameter.unsharded_accumulated_grad)
    except (ImportError, AttributeError):
        return None
    return rows
