"""Recompute instead of keep: per layer, non-re-entrant, so it works with frozen inputs and every sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# What `selective` keeps: results that cost a matmul or an attention. Everything else is recomputed.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(context: object, op: Callable, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_layers(layers: nn.ModuleDict, level: str) -> None:
    """Wrap each layer in place. `full` keeps a layer's input only; `selective` also its matmul results."""
    if level == "none":
        return
    extra = {}
    if level == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for name, layer in layers.items():
        layers[name] = checkpoint_wrapper(layer, preserve_rng_state=True, **extra)
