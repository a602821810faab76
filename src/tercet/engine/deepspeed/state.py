"""What a DeepSpeed rank holds of each parameter, as flat ranges. The one file that knows DeepSpeed's flat buffers.

DeepSpeed strings the parameters of a group together and cuts the string by ranks (stages 1 and 2), or cuts each
parameter by ranks and pads it (stage 3). Either way a rank holds one range of each parameter's elements, which is
what checkpoints store: any other number of ranks, and any other engine, finds its own part in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.spec.optimizers.adamw import MOMENTS


@dataclass
class Fragment:
    """Elements [begin, begin + len(master)) of a flattened parameter: views into DeepSpeed's fp32 buffers.

    Of a group that lives in files the views hold until the next group is asked for.
    """

    name: str
    begin: int
    master: Tensor  # fp32, one dimension
    moments: dict[str, Tensor]


class Fragments:
    """Views of masters and moments of every parameter under stages 0 to 3.

    Groups that DeepSpeed keeps in files (offload to nvme) are brought into memory one at a time.
    """

    def __init__(self, engine: Any, names: dict[nn.Parameter, str], zero: int, rank: int, ranks: int):
        self._optimizer, self._names, self._zero, self._rank = engine.optimizer, names, zero, rank
        self._ranks = ranks
        self.base = engine.basic_optimizer
        # Stage 0 keeps fp32 copies of bf16 and fp16 weights, and fp32 weights themselves are the masters.
        low, high = getattr(self._optimizer, "fp16_groups", ()), getattr(self._optimizer, "fp32_groups", ())
        self._copies = (
            {p: c for ps, cs in zip(low, high, strict=False) for p, c in zip(ps, cs, strict=True)} if zero == 0 else {}
        )
        self.flats: list[Tensor] = self._flat_masters()
        in_files = getattr(self._optimizer, "_swappable_optimizer_subgroup", lambda group: False)
        self._in_files = {group for group in range(len(self.flats)) if in_files(group)}
        self._present: int | None = None  # the group that was brought from its files
        self._make_moments()

    def _flat_masters(self) -> list[Tensor]:
        if self._zero == 0:
            return [self._whole_master(p) for p in self._names]
        if self._zero == 3:
            return self._optimizer.fp32_partitioned_groups_flat
        if hasattr(self._optimizer, "fp32_groups_flat_partition"):  # bf16 under stage 1 has an optimizer of its own
            return self._optimizer.fp32_groups_flat_partition
        return self._optimizer.single_partition_of_fp32_groups

    def _whole_master(self, parameter: nn.Parameter) -> Tensor:
        return self._copies.get(parameter, parameter)

    def _make_moments(self) -> None:
        """Allocate the moments now, not at the first step, so that a checkpoint can be read into them."""
        for group, flat in enumerate(self.flats):
            self._bring(group)
            state = self.base.state[flat]
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(flat, requires_grad=False)
            self._put_away(changed=True)

    def set_updates(self, updates: int) -> None:
        """Set AdamW's own count of steps."""
        for flat in self.flats:
            self.base.state[flat]["step"].fill_(updates)

    # ------------------------------------------------------------------------------------------ groups in files

    def _bring(self, group: int) -> None:
        if group in self._in_files:
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
            self._present = group

    def _put_away(self, changed: bool) -> None:
        if self._present is not None and changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._present)
        elif self._present is not None:
            self._optimizer._release_swap_buffers(self._present)
        self._present = None

    # ------------------------------------------------------------------------------------------------ fragments

    def each(self) -> Iterator[Fragment]:
        """Yield this rank's fragments, for the caller to write into."""
        for _, parameters in self._by_group():
            yield from filter(None, (self._of(p) for p in parameters))
            self._put_away(changed=True)

    def to_save(self) -> Iterator[tuple[int | None, list[Fragment]]]:
        """Yield (group that lives in files, or None for all in memory; the fragments that this rank writes)."""
        for group, parameters in self._by_group():
            if self._zero == 0:  # everything is everywhere
                parameters = parameters[self._rank :: self._ranks]
            yield group, [f for f in map(self._of, parameters) if f is not None]
            self._put_away(changed=False)

    def _by_group(self) -> list[tuple[int | None, list[nn.Parameter]]]:
        groups: dict[int | None, list[nn.Parameter]] = {}
        for parameter in self._names:
            group = self._position(parameter)[0] if self._in_files else None
            groups.setdefault(group if group in self._in_files else None, []).append(parameter)
        return list(groups.items())

    def _position(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Return (group, offset in it, length) of this rank's part under stage 3."""
        return self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]

    def _of(self, parameter: Any) -> Fragment | None:
        """Return this rank's fragment of a parameter, or None when it holds none of it."""
        if self._zero == 0:
            begin = offset = 0
            length, flat = parameter.numel(), self._whole_master(parameter)
        elif self._zero == 3:
            group, offset, length = self._position(parameter)
            begin = self._rank * length
            length = min(length, parameter.ds_numel - begin)  # the last ranks' parts are padded
            if length <= 0:
                return None
            if group != self._present:
                self._put_away(changed=False)
                self._bring(group)
            flat = self.flats[group]
        else:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            begin = mapping.lp_fragment_address.start
            offset, length = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            flat = self.flats[mapping.param_group_index]
        state = self.base.state[flat]
        return Fragment(
            self._names[parameter],
            begin,
            flat.detach().view(-1)[offset : offset + length],
            {m: state[m].view(-1)[offset : offset + length] for m in MOMENTS},
        )

    def wholes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 parameter), put together from all ranks; every rank must run through all."""
        try:
            for parameter, name in self._names.items():
                yield name, self._whole(parameter, shapes[name])
        finally:
            self._put_away(changed=False)

    def _whole(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
        fragment = self._of(parameter)
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        whole = torch.zeros(shape, dtype=torch.float32, device=device)
        if fragment is not None:
            end = fragment.begin + fragment.master.numel()
            whole.view(-1)[fragment.begin : end].copy_(fragment.master)
        if self._zero > 0:
            dist.all_reduce(whole)  # all others add zeros
        return whole

    def held(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds now, by ledger row: masters, moments, gradients, buffers; `pinned`: on the host."""
        optimizer = self._optimizer

        def named(*names: str) -> list[Tensor]:
            return [t for name in names for t in _tensors(getattr(optimizer, name, None))]

        # What the optimizer updates from lies beside it: on the host when that is offloaded.
        beside = [t.grad for t in self.flats if t.grad is not None] + named("grad_partitions_flat_buffer")
        gradients = named("fp32_groups_gradients_flat", "averaged_gradients")
        gradients += [t.grad for t in self._names if t.grad is not None]
        offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
        pinned = named(
            "accumulated_grads_in_cpu",
            "temp_grad_buffer_for_cpu_offload",
            "param_buffer_of_bit16_for_cpu_offload_groups",
        )
        if self._in_files:
            pinned += optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        buckets = [
            t for b in getattr(optimizer, "ipg_buckets", {}).values() for t in _tensors(getattr(b, "buffer", None))
        ]
        return {
            "master": [f.detach() for f in self.flats],
            "optimizer": [t for f in self.flats for t in self.base.state[f].values() if isinstance(t, Tensor)],
            "gradients": gradients + ([] if offloaded else beside),
            "buffers": buckets + named("temp_grad_buffer_for_gpu_offload"),
            "pinned": pinned + (beside if offloaded else []),
        }


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


# ------------------------------------------------------------------------------------------------ loss scaling

SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(scaler: Any) -> dict[str, float]:
    """Return all that a DeepSpeed loss scaler remembers between steps (A12)."""
    return {key: getattr(scaler, key) for key in SCALER_KEYS if hasattr(scaler, key)}


def restore_scaler(scaler: Any, state: dict[str, float]) -> None:
    for key, value in state.items():
        if key in SCALER_KEYS and hasattr(scaler, key):
            setattr(scaler, key, value)
