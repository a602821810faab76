"""DeepSpeed's JSON, written from our Strategy: complete, without `auto`, never read back. No torch in here.

Keys and meanings: deepspeed/runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py,
runtime/precision_config.py (github.com/deepspeedai/DeepSpeed, 0.19).
"""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Any

from tercet.engine.scaling import FIRST, GOOD_STEPS, SMALLEST
from tercet.spec import deepspeed as limits
from tercet.spec.model import Model
from tercet.spec.recipe import OptimSection
from tercet.spec.strategy import Strategy

NEVER = 10**9  # steps between two of DeepSpeed's own progress lines: the run has its own
# As the native engine scales (engine/scaling.py); every overflow halves (hysteresis 1).
LOSS_SCALING = {
    "loss_scale": 0,  # dynamic
    "initial_scale_power": int(log2(FIRST)),
    "loss_scale_window": GOOD_STEPS,
    "hysteresis": 1,
    "min_loss_scale": int(SMALLEST),
}
# DeepSpeed's defaults, written out.
ASYNC_IO = {
    "block_size": 2**20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


def deepspeed_config(
    model: Model,
    strategy: Strategy,
    optim: OptimSection,
    precision: str,
    batch_sequences: int,
    *,
    on_card: bool,
    swap: Path | None = None,
) -> dict[str, Any]:
    """Return the configuration of one run. `swap`: the folder for what is on nvme.

    `train_batch_size` counts rows (micro-batch x accumulation x ranks), of which the last ones may be padding.
    The optimizer is PyTorch's fused AdamW, on the host too: as fast as DeepSpeed's own there, which every machine
    would have to compile first (docs/decisions/0052). Gradients are summed and sent in fp32 whatever the weights'
    type; stage 0 can only add micro-batches up in the weights' type, so there it has one micro-batch, or fp32.
    """
    accumulation = strategy.accumulation(batch_sequences)
    config: dict[str, Any] = {
        "train_batch_size": strategy.micro_batch * accumulation * strategy.mesh.data_ranks,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0 if optim.clip == "none" else optim.clip,
        "optimizer": {"type": "AdamW", "params": _adamw(optim)},
        "zero_optimization": zero_section(model, strategy, on_card, swap),
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": precision == "fp16", **(LOSS_SCALING if precision == "fp16" else {})},
        "data_types": {"grad_accum_dtype": summed_in(strategy, precision, accumulation)},
        "communication_data_type": "fp32",
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
    }
    if strategy.on_nvme:
        config["aio"] = ASYNC_IO
    return config


def _adamw(optim: OptimSection) -> dict[str, Any]:
    return {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "torch_adam": True,
        "adam_w_mode": True,
        "fused": True,
    }


def summed_in(strategy: Strategy, precision: str, accumulation: int) -> str:
    """Return the format in which micro-batches' gradients are added up: fp32, unless there is nothing to add.

    Stage 0 knows the weights' format alone. Under stages 1 and 2 with the optimizer on the host fp32 costs 4 bytes
    on the card for each parameter of the rank's part, which one micro-batch a step does not need.
    """
    alone = accumulation == 1 and strategy.zero < 3 and strategy.offload_optimizer != "none"
    return precision if strategy.zero == 0 or alone else "fp32"


def zero_section(model: Model, strategy: Strategy, on_card: bool, swap: Path | None) -> dict[str, Any]:
    """Return `zero_optimization`: buckets no larger than the model needs, so small models stay small.

    `swap`: the folder for what is on nvme.
    """
    if strategy.zero == 0:
        return {"stage": 0}
    largest = max(t.parameters for t in model.tensors())
    bucket = min(limits.LARGEST_BUCKET, model.parameters)  # a larger tensor is reduced by itself
    section: dict[str, Any] = {
        "stage": strategy.zero,
        "contiguous_gradients": True,
        "overlap_comm": on_card and strategy.ranks > 1,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
    }
    if strategy.offload_optimizer != "none":
        section["offload_optimizer"] = offload(strategy.offload_optimizer, on_card, swap)
    if strategy.zero < 3:
        section |= {"allgather_partitions": True, "allgather_bucket_size": bucket, "round_robin_gradients": False}
        return section
    layer = sum(t.parameters for t in model.tensors() if t.name.startswith("model.layers.0."))
    section |= {
        # As many parameters as are worth fetching ahead: one layer. Norms and other small ones stay everywhere.
        "stage3_prefetch_bucket_size": layer,
        "stage3_param_persistence_threshold": 10 * model.width,
        "stage3_max_live_parameters": max(2 * layer, limits.LIVE),
        "stage3_max_reuse_distance": max(2 * layer, limits.LIVE),
        "stage3_gather_16bit_weights_on_model_save": False,
        "sub_group_size": max(1, min(model.parameters, 1_000_000_000)),
    }
    if "optimizer" in strategy.on_nvme:
        section["offload_optimizer"] |= {"buffer_count": 4, "pipeline_read": False, "pipeline_write": False}
        # Each weight a group of its own: DeepSpeed 0.19 reads a gradient wrongly into a place within a group that is
        # not a multiple of 512 bytes, as it is where three ranks share (tests/distributed/test_deepspeed_nvme.py).
        section["sub_group_size"] = 1
    if strategy.offload_weights != "none":
        section["offload_param"] = offload(strategy.offload_weights, on_card, swap)
    if "weights" in strategy.on_nvme:
        section["offload_param"] |= {
            "buffer_count": limits.NVME_WEIGHT_BUFFERS,
            "buffer_size": nvme_weight_buffer(largest, strategy.ranks),
            "max_in_cpu": 0,
        }
        # A buffer is held until its weight is let go. Fetching ahead asks twice for a weight that is used twice
        # within the window, which DeepSpeed 0.19 then asserts against (partitioned_param_coordinator.py).
        section |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return section


def nvme_weight_buffer(largest: int, ranks: int) -> int:
    """Return the elements of one buffer: a rank's part of the largest weight."""
    return -(-largest // ranks)


def offload(device: str, on_card: bool, swap: Path | None) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": on_card}
    if device == "nvme":
        section["nvme_path"] = str(swap)
    return section
