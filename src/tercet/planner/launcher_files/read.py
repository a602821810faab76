"""Reads DeepSpeed's JSON and Accelerate's YAML: what they mean here, and which of their keys mean nothing.

Sources: deepspeed/runtime/zero/config.py and runtime/constants.py (github.com/deepspeedai/DeepSpeed), and
accelerate/commands/config/config_args.py and commands/launch.py (accelerate 1.15).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from tercet.errors import InputError, nearest
from tercet.planner.launcher_files.content import read_file

# What Tercet takes over stands in the code below; the other keys are known, but change no plan.
_KEYS = {
    name: frozenset(keys.split())
    for name, keys in tomllib.loads(
        (resources.files("tercet.planner.launcher_files") / "keys.toml").read_text(encoding="utf-8")
    ).items()
}
DEEPSPEED = _KEYS["deepspeed"]
ZERO = _KEYS["zero"]
ONLY_STAGE_3 = frozenset(k for k in ZERO if k.startswith("stage3_")) | {
    "offload_param",
    "cpu_offload_param",
    "sub_group_size",
    "memory_efficient_linear",
    "override_module_apply",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
}
# Read by the optimizer of stages 1 and 2; stage 3 has another, which gathers and reduces in its own way.
ONLY_STAGE_12 = frozenset(
    (
        "allgather_partitions",
        "allgather_bucket_size",
        "load_from_fp32_weights",
        "round_robin_gradients",
        "ignore_unused_parameters",
        "use_multi_rank_bucket_allreduce",
        "legacy_stage1",
    )
)
OFFLOAD = _KEYS["offload"]
DEPRECATED = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "bfloat16": "bf16",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

ACCELERATE = _KEYS["accelerate"]
ACCELERATE_DEEPSPEED = _KEYS["accelerate_deepspeed"]
ACCELERATE_FSDP = _KEYS["accelerate_fsdp"]


DEFAULT_BUCKET = 500_000_000  # reduce_bucket_size of DeepSpeed's runtime/zero/config.py


@dataclass
class LauncherFile:
    """What a file means. `findings` holds (key, kind, sentence); kind: dead, contradiction, unknown, refused, note."""

    path: str
    zero: int = 0
    offload_optimizer: str = "none"
    offload_weights: str = "none"
    nvme_path: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    precision: str | None = None
    ranks: int | None = None
    recompute: str | None = None
    pinned: bool = False
    engine: str = "native"  # which of ours runs it so: DeepSpeed's own, or native for FSDP and plain data parallelism
    sums: str | None = None  # the format in which gradients are added up and sent; None: the weights' format
    bucket: int = DEFAULT_BUCKET  # elements
    findings: list[tuple[str, str, str]] = field(default_factory=list)

    def say(self, key: str, kind: str, sentence: str) -> None:
        self.findings.append((key, kind, sentence))

    def unknown(self, key: str, known: frozenset[str], prefix: str = "") -> None:
        self.say(prefix + key, "unknown", f"{prefix}{key} is not a key that is read{nearest(key, known)}")


# ---------------------------------------------------------------------------------------------------- DeepSpeed


def read_deepspeed(content: dict[str, Any], path: str, ranks: int | None) -> LauncherFile:
    """Return what a DeepSpeed configuration means. Raises InputError for values of the wrong kind."""
    found = LauncherFile(path, ranks=ranks, engine="deepspeed")
    for key in content:
        if key not in DEEPSPEED:
            found.unknown(key, DEEPSPEED)
        if key in DEPRECATED:
            found.say(key, "note", f"{key} is an old name of {DEPRECATED[key]}")
    _precision(content, found)
    zero = content.get("zero_optimization", {})
    if isinstance(zero, bool):
        found.zero = int(zero)
        found.say("zero_optimization", "note", "zero_optimization: true is an old form of stage 1")
    elif isinstance(zero, dict):
        _zero(zero, found)
    else:
        raise InputError(f"{path}: zero_optimization is {zero!r}; it must be a section")
    _batch(content, found)
    _sums(content, found)
    checkpointing = content.get("activation_checkpointing")
    if checkpointing:
        found.say(
            "activation_checkpointing",
            "dead",
            "activation_checkpointing sets options of deepspeed.checkpointing; by itself it recomputes nothing: the "
            "model must call it (here: strategy.recompute=full)",
        )
    return found


def _precision(content: dict[str, Any], found: LauncherFile) -> None:
    """Without "auto" DeepSpeed trains in fp32 when both formats are switched off."""
    given = {k: _enabled(content[k], k, found) for k in ("fp16", "bf16", "bfloat16") if content.get(k) is not None}
    on = [k for k, enabled in given.items() if enabled is True]
    if len(on) > 1:
        found.say(on[0], "contradiction", f"{' and '.join(on)} are both enabled; DeepSpeed stops at that: keep one")
    if on:
        found.precision = "fp16" if on == ["fp16"] else "bf16"
    elif "auto" in given.values():
        names = " and ".join(k for k, enabled in given.items() if enabled == "auto")
        found.say(names, "note", f"{names}: auto is filled in from the recipe's train.precision")
    elif given:
        found.precision = "fp32"
        found.say(next(iter(given)), "note", "neither fp16 nor bf16 is enabled: DeepSpeed trains in fp32")


def _sums(content: dict[str, Any], found: LauncherFile) -> None:
    """Read in which format gradients are added up and sent; without a word DeepSpeed takes the weights'."""
    types = content.get("data_types")
    said = {
        "communication_data_type": content.get("communication_data_type"),
        "data_types.grad_accum_dtype": types.get("grad_accum_dtype") if isinstance(types, dict) else None,
    }
    for key, value in said.items():
        if value is not None and value not in ("fp32", "fp16", "bf16", "bfp16"):
            raise InputError(f"{found.path}: {key} is {value!r}; it must be fp32, fp16 or bf16")
    found.sums = "fp32" if "fp32" in said.values() else None
    zero = content.get("zero_optimization")
    bucket = zero.get("reduce_bucket_size") if isinstance(zero, dict) else None
    if isinstance(bucket, int | float) and not isinstance(bucket, bool) and bucket >= 1:
        found.bucket = int(bucket)


def _enabled(section: Any, key: str, found: LauncherFile) -> bool | str:
    """Return whether a format is on, or "auto"; a section without the key `enabled` is off."""
    if not isinstance(section, dict):
        word = str(section).lower()
        found.say(key, "refused", f'{key}: {word} must be a section: {{"enabled": {word}}}')
        return word == "true"
    value = section.get("enabled", False)
    if value == "auto" or isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false", "0", "1"):
        return str(value).lower() in ("true", "1")
    raise InputError(f"{found.path}: {key}.enabled is {value!r}; it must be true, false or auto")


def _zero(zero: dict[str, Any], found: LauncherFile) -> None:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{found.path}: zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    found.zero = int(stage)
    for key, value in zero.items():
        full = f"zero_optimization.{key}"
        if key not in ZERO:
            found.unknown(key, ZERO, "zero_optimization.")
        elif key in ONLY_STAGE_3 and found.zero != 3:
            found.say(full, "dead", f"{full} acts in stage 3 only, and the stage is {found.zero}")
        elif key in ONLY_STAGE_12 and found.zero == 3:
            found.say(full, "dead", f"{full} acts in stages 1 and 2 only; stage 3 does not read it")
        elif key == "offload_optimizer" and found.zero == 0:
            found.say(full, "dead", f"{full} needs stage 1, 2 or 3")
        if key in DEPRECATED:
            found.say(full, "note", f"{full} is an old name of {DEPRECATED[key]}")
        if key in ("offload_optimizer", "offload_param") and isinstance(value, dict):
            for inner in value:
                if inner not in OFFLOAD:
                    found.unknown(inner, OFFLOAD, f"{full}.")
            device = str(value.get("device") or "none")
            if device not in ("none", "cpu", "nvme"):
                raise InputError(f"{found.path}: {full}.device is {device!r}; it must be none, cpu or nvme")
            if device == "nvme":
                found.nvme_path = value.get("nvme_path") or found.nvme_path
            if device == "nvme" and not value.get("nvme_path"):
                found.say(full, "refused", f"{full}.device nvme needs nvme_path")
            if device != "nvme" and value.get("nvme_path"):
                found.say(f"{full}.nvme_path", "dead", f"{full}.nvme_path acts with device nvme only")
            if device == "none" and len(value) > 1:
                found.say(full, "dead", f"{full}: with device none its other keys do nothing")
            found.pinned |= bool(value.get("pin_memory")) and device != "none"
            if key == "offload_optimizer" and found.zero:
                found.offload_optimizer = device
            elif key == "offload_param" and found.zero == 3:
                found.offload_weights = device
    if zero.get("cpu_offload"):
        found.offload_optimizer = "cpu"


def _batch(content: dict[str, Any], found: LauncherFile) -> None:
    """Two of the three sizes give the third (E09); "auto" is filled by transformers' Trainer."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: list[int | None] = []
    for key in keys:
        value = content.get(key)
        if value == "auto":
            found.say(key, "note", f"{key}: auto is filled in by transformers' Trainer, from its own arguments")
            value = None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{found.path}: {key} is {value!r}; it must be a whole number of at least 1")
        sizes.append(value)
    batch, micro, accumulation = sizes
    ranks = found.ranks or 1
    if batch and micro and accumulation:
        if batch != micro * accumulation * ranks:
            found.say(
                keys[0],
                "contradiction",
                f"train_batch_size {batch} is not micro-batch {micro} x accumulation {accumulation} x {ranks} ranks = "
                f"{micro * accumulation * ranks}; DeepSpeed stops at that",
            )
    elif batch and (micro or accumulation):
        known = micro or accumulation or 1
        third = batch / (known * ranks)
        name = "accumulation" if micro else "micro-batch"
        if third != int(third) or third < 1:
            unit = known * ranks
            below, above = max(unit, batch // unit * unit), -(-batch // unit) * unit
            choices = f"{above}" if below == above else f"{below} or {above}"
            found.say(
                keys[0],
                "contradiction",
                f"train_batch_size {batch} over {ranks} ranks and "
                f"{'micro-batch' if micro else 'accumulation'} {known} leaves "
                f"{name} {third:.2f}; {choices} would divide",
            )
        else:
            found.say(keys[0], "note", f"{name} follows: {batch} / ({known} x {ranks} ranks) = {int(third)}")
            if micro:
                accumulation = int(third)
            else:
                micro = int(third)
    elif batch:
        accumulation = 1
        if batch % ranks:
            found.say(keys[0], "contradiction", f"train_batch_size {batch} is not divisible by {ranks} ranks")
        micro = max(1, batch // ranks)
    elif micro:
        accumulation = accumulation or 1
        batch = micro * accumulation * ranks
    found.batch, found.micro_batch, found.accumulation = batch, micro, accumulation


# --------------------------------------------------------------------------------------------------- Accelerate


def read_accelerate(content: dict[str, Any], path: str) -> LauncherFile:
    """Return what an Accelerate configuration means; follows deepspeed_config_file when it names one."""
    ranks = content.get("num_processes")
    found = LauncherFile(path, ranks=ranks if isinstance(ranks, int) and ranks > 0 else None)
    for key in content:
        if key not in ACCELERATE:
            found.unknown(key, ACCELERATE)
    kind = content.get("distributed_type")
    deepspeed, fsdp = content.get("deepspeed_config") or {}, content.get("fsdp_config") or {}
    if kind is None:
        wanted = "DEEPSPEED" if deepspeed or any(k in ZERO for k in content) else "FSDP" if fsdp else "MULTI_GPU"
        found.say(
            "distributed_type",
            "refused",
            f"distributed_type is missing: accelerate launch refuses the file; add distributed_type: {wanted}",
        )
        kind = wanted
    precision = content.get("mixed_precision")
    _mixed_precision(content, found)
    if "fp16" in content and precision is not None:
        found.say(
            "fp16",
            "contradiction",
            f"fp16 and mixed_precision: {precision} are both given; only mixed_precision is read",
        )
    if deepspeed and kind != "DEEPSPEED":
        found.say("deepspeed_config", "dead", f"deepspeed_config does nothing with distributed_type: {kind}")
    if fsdp and kind != "FSDP":
        found.say("fsdp_config", "dead", f"fsdp_config does nothing with distributed_type: {kind}")
    if kind == "DEEPSPEED":
        found.engine = "deepspeed"
        _accelerate_deepspeed(deepspeed, content, found)
    elif kind == "FSDP":
        _accelerate_fsdp(fsdp, found)
    return found


def _mixed_precision(content: dict[str, Any], found: LauncherFile) -> None:
    """Follow accelerate: `no` (which YAML reads as false) is fp32; an old file says `fp16: true` instead."""
    value = content.get("mixed_precision")
    if value is None:
        if content.get("fp16"):
            found.precision = "fp16"
    elif value is False or value == "no":
        found.precision = "fp32"
    elif value in ("fp16", "bf16", "fp8"):
        found.precision = value
    else:
        raise InputError(f"{found.path}: mixed_precision is {value!r}; it must be no, fp16, bf16 or fp8")


def _accelerate_deepspeed(section: dict[str, Any], content: dict[str, Any], found: LauncherFile) -> None:
    file = section.get("deepspeed_config_file")
    if file:
        inner = read_deepspeed(read_file(str(Path(found.path).expanduser().parent / file)), str(file), found.ranks)
        for key in section:
            if key in (
                "zero_stage",
                "gradient_accumulation_steps",
                "gradient_clipping",
                "offload_optimizer_device",
                "offload_param_device",
                "zero3_save_16bit_model",
            ):
                inner.say(
                    key,
                    "contradiction",
                    f"deepspeed_config.{key} beside deepspeed_config_file: accelerate refuses both",
                )
        inner.findings = found.findings + inner.findings
        inner.path, inner.precision = found.path, inner.precision or found.precision
        found.__dict__.update(inner.__dict__)
        return
    for key in section:
        if key in ACCELERATE_DEEPSPEED:
            continue
        if key in ZERO or key in DEEPSPEED:
            found.say(
                f"deepspeed_config.{key}",
                "dead",
                f"deepspeed_config.{key} belongs into a DeepSpeed JSON (deepspeed_config_file); accelerate's own "
                "section "
                "does not pass it on",
            )
        else:
            found.unknown(key, ACCELERATE_DEEPSPEED, "deepspeed_config.")
    stage = section.get("zero_stage")
    if stage is None:
        stage = content.get("zero_stage", 2)
        if "zero_stage" not in content:
            found.say("zero_stage", "note", "zero_stage is not given: accelerate takes 2")
    try:
        found.zero = int(stage)
    except (TypeError, ValueError):
        raise InputError(f"{found.path}: deepspeed_config.zero_stage is {stage!r}; it must be 0, 1, 2 or 3") from None
    found.offload_optimizer = str(section.get("offload_optimizer_device") or "none")
    weights = str(section.get("offload_param_device") or "none")
    if weights != "none" and found.zero != 3:
        found.say(
            "offload_param_device",
            "dead",
            f"offload_param_device acts in stage 3 only, and the stage is {found.zero}",
        )
    elif weights != "none":
        found.offload_weights = weights
    for what, where in (("optimizer", found.offload_optimizer), ("param", weights)):
        if where == "nvme":
            found.nvme_path = section.get(f"offload_{what}_nvme_path") or found.nvme_path
    if section.get("zero3_init_flag") and found.zero != 3:
        found.say("zero3_init_flag", "dead", f"zero3_init_flag acts in stage 3 only, and the stage is {found.zero}")
    steps = section.get("gradient_accumulation_steps")
    found.accumulation = steps if isinstance(steps, int) else None


def _accelerate_fsdp(section: dict[str, Any], found: LauncherFile) -> None:
    for key in section:
        if key not in ACCELERATE_FSDP:
            found.unknown(key, ACCELERATE_FSDP, "fsdp_config.")
    version = section.get("fsdp_version", 1)
    strategy = str(section.get("fsdp_sharding_strategy", "FULL_SHARD"))
    if version == 2 and "fsdp_sharding_strategy" in section:
        found.say(
            "fsdp_sharding_strategy",
            "dead",
            "fsdp_config.fsdp_sharding_strategy is FSDP1's; FSDP2 reads fsdp_reshard_after_forward",
        )
        strategy = "FULL_SHARD"
    grad_only = "GRAD" in strategy or strategy == "2"
    if version == 2 and section.get("fsdp_reshard_after_forward") is False:
        grad_only = True
    found.zero = 0 if "NO_SHARD" in strategy or strategy == "3" else 2 if grad_only else 3
    if section.get("fsdp_offload_params"):
        found.offload_weights = found.offload_optimizer = "cpu"
    if section.get("fsdp_activation_checkpointing"):
        found.recompute = "full"
