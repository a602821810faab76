"""Recompute instead of keep: per layer, non-re-entrant, so it works with frozen inputs and every sharding."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tercet.parallel.offload import InputsOnHost
from tercet.spec.recompute import KEPT_OPERATORS


def _policy(context: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(layer: nn.Module, level: str, inputs: InputsOnHost | None = None) -> None:
    """Make a layer recompute, in place: `full` keeps its input only, `selective` also its matmuls' results.

    `inputs` keeps the layer's first argument in host memory until its backward.

    Replaces `forward` instead of wrapping the module, so names stay; call before sharding, whose hooks run outside.
    """
    if level == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if level == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation keeps nothing anyway
            return plain(*args, **kwargs)
        with nullcontext() if inputs is None else inputs.around(args[0]):
            return checkpoint(plain, *args, **options, **kwargs)

    layer.forward = forward
