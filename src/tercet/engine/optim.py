"""Parameter groups from tensor kinds, and the optimizers. Used by every engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercet.engine.adamw import RowAdamW
from tercet.parallel.parameter_shard import ParameterShard
from tercet.spec.recipe import OptimSection

UNDECAYED = frozenset(("norm", "bias"))  # decaying a scale or a shift pulls it to a value that means nothing


def build_optimizer(parts: Sequence[ParameterShard], optim: OptimSection, seed: int = 0) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) over the parts' values: torch's fused one where all
    is fp32, else ours. `seed` is that of stochastic rounding."""
    decayed = [p.value for p in parts if p.description.kind not in UNDECAYED]
    others = [p.value for p in parts if p.description.kind in UNDECAYED]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "adamw" and all(p.value.dtype == torch.float32 for p in parts):
        fused = not any(p.value.is_meta for p in parts)  # a rehearsal's host holds shapes only
        return torch.optim.AdamW(groups, fused=fused, **settings)
    return RowAdamW(groups, parts, seed, **settings)


def square_sum(parts: Sequence[ParameterShard]) -> Tensor:
    """Return the sum of squares of all gradients, fp64 on the CPU: fp32 norms per tensor, added in fp64."""
    grads = [p.value.grad for p in parts if p.value.grad is not None]
    norms = torch._foreach_norm(grads) if grads else [torch.zeros(())]
    return torch.stack(norms).double().square().sum().cpu()


def scale_gradients(parts: Sequence[ParameterShard], factor: float) -> None:
    torch._foreach_mul_([p.value.grad for p in parts if p.value.grad is not None], factor)
