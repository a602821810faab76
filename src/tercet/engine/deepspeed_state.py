"""What a DeepSpeed rank holds of each parameter, as flat ranges. The one file that knows DeepSpeed's flat buffers.

DeepSpeed strings the parameters of a group together and cuts the string by ranks (stages 1 and 2), or cuts each
parameter by ranks and pads it (stage 3). Either way a rank holds one range of each parameter's elements, which is
what checkpoints store: any other number of ranks, and any other engine, finds its own part in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Fragment:
    """Elements [begin, begin + len(master)) of a flattened parameter: views into DeepSpeed's fp32 buffers."""

    name: str
    begin: int
    master: Tensor  # fp32, one dimension
    moments: dict[str, Tensor]


class Fragments:
    """Views of masters and moments of every parameter under stages 1, 2 and 3."""

    def __init__(self, engine: Any, names: dict[nn.Parameter, str], zero: int, rank: int):
        self._optimizer, self._names, self._zero, self._rank = engine.optimizer, names, zero, rank
        self.base = engine.basic_optimizer
        self.flats: list[Tensor] = self._flat_masters()
        self._make_moments()

    def _flat_masters(self) -> list[Tensor]:
        if self._zero == 3:
            return self._optimizer.fp32_partitioned_groups_flat
        if hasattr(self._optimizer, "fp32_groups_flat_partition"):  # bf16 under stage 1 has an optimizer of its own
            return self._optimizer.fp32_groups_flat_partition
        return self._optimizer.single_partition_of_fp32_groups

    def _make_moments(self) -> None:
        """Allocate the moments now, not at the first step, so that a checkpoint can be read into them."""
        for flat in self.flats:
            state = self.base.state[flat]
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(flat, requires_grad=False)

    def set_updates(self, updates: int) -> None:
        """Set AdamW's own count of steps."""
        for flat in self.flats:
            self.base.state[flat]["step"].fill_(updates)

    def __iter__(self) -> Iterator[Fragment]:
        for parameter, name in self._names.items():
            found = self.of(parameter, name)
            if found is not None:
                yield found

    def of(self, parameter: nn.Parameter, name: str) -> Fragment | None:
        """Return this rank's fragment of a parameter, or None when it holds none of it."""
        if self._zero == 3:
            group, offset, length = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            begin = self._rank * length
            length = min(length, parameter.ds_numel - begin)  # the last ranks' parts are padded
            if length <= 0:
                return None
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
            name, begin, flat.detach()[offset : offset + length],
            {m: state[m][offset : offset + length] for m in MOMENTS},
        )  # fmt: skip

    def whole(self, parameter: nn.Parameter, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the whole fp32 parameter, put together from all ranks' fragments; every rank must call it."""
        fragment = self.of(parameter, name)
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        whole = torch.zeros(shape, dtype=torch.float32, device=device)
        if fragment is not None:
            end = fragment.begin + fragment.master.numel()
            whole.view(-1)[fragment.begin : end].copy_(fragment.master)
        dist.all_reduce(whole)  # all others add zeros
        return whole

    def held(self) -> dict[str, list[Tensor]]:
        """Return masters, moments, gradients, and the buckets that gradients are reduced in, held by this rank now."""
        gradients: list[Tensor] = [f.grad for f in self.flats if f.grad is not None]
        for name in (
            "grad_partitions_flat_buffer", "fp32_groups_gradients_flat", "averaged_gradients", "accumulated_grads_in_cpu",
        ):  # fmt: skip
            gradients += _tensors(getattr(self._optimizer, name, None))
        buckets = [
            t for b in getattr(self._optimizer, "ipg_buckets", {}).values() for t in _tensors(getattr(b, "buffer", None))
        ]
        moments = [t for f in self.flats for t in self.base.state[f].values() if isinstance(t, Tensor)]
        masters = [f.detach() for f in self.flats]
        return {"master": masters, "optimizer": moments, "gradients": gradients, "buffers": buckets}


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
