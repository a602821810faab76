"""Reads DeepSpeed's JSON and Accelerate's YAML: what they mean here, and which of their keys mean nothing.

Sources: deepspeed/runtime/zero/config.py and runtime/constants.py (github.com/deepspeedai/DeepSpeed), and
accelerate/commands/config/config_args.py and commands/launch.py (accelerate 1.15).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tercet.errors import InputError, nearest

# DeepSpeed, top level. What Tercet takes over stands in the code below; the rest is known, but changes no plan.
DEEPSPEED = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16
    bfloat16 amp gradient_clipping zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    steps_per_print wall_clock_breakdown memory_breakdown dump_state communication_data_type
    seq_parallel_comm_data_type prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather
    activation_checkpointing aio flops_profiler tensorboard wandb csv_monitor comet comms_logger checkpoint
    data_types elasticity autotuning compression_training data_efficiency curriculum_learning eigenvalue
    progressive_layer_drop sparse_attention hybrid_engine pipeline compile graph_harvesting dataloader_drop_last
    vocabulary_size nebula weight_quantization tensor_parallel torch_autocast sequence_parallel_size
    use_data_before_expert_parallelism""".split()
)
ZERO = frozenset(
    """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param
    offload_optimizer zenflow sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1
    round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module""".split()
)
ONLY_STAGE_3 = frozenset(k for k in ZERO if k.startswith("stage3_")) | {
    "offload_param", "cpu_offload_param", "sub_group_size", "memory_efficient_linear", "override_module_apply",
    "zero_hpz_partition_size", "zero_quantized_weights",
}  # fmt: skip
# Read by the optimizer of stages 1 and 2; stage 3 has another, which gathers and reduces in its own way.
ONLY_STAGE_12 = frozenset(
    ("allgather_partitions", "allgather_bucket_size", "load_from_fp32_weights", "round_robin_gradients",
     "ignore_unused_parameters", "use_multi_rank_bucket_allreduce", "legacy_stage1")
)  # fmt: skip
OFFLOAD = frozenset(
    """device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write fast_init ratio
    super_offload cpuadam_cores_perc""".split()
)
DEPRECATED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param", "bfloat16": "bf16",
              "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
              "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}  # fmt: skip

ACCELERATE = frozenset(
    """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
    gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity
    fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16
    tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config""".split()
)
ACCELERATE_DEEPSPEED = frozenset(
    """deepspeed_config_file zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device
    offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag zero3_save_16bit_model
    deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names""".split()
)
ACCELERATE_FSDP = frozenset(
    """fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_offload_params
    fsdp_state_dict_type fsdp_backward_prefetch fsdp_forward_prefetch fsdp_use_orig_params
    fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing
    fsdp_activation_checkpointing_offload fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap""".split()
)


@dataclass
class Reading:
    """What a file means. `findings` holds (key, kind, sentence); kind: dead, contradiction, unknown, refused, note."""

    path: str
    zero: int = 0
    offload_optimizer: str = "none"
    offload_weights: str = "none"
    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    precision: str | None = None
    ranks: int | None = None
    recompute: str | None = None
    pinned: bool = False
    findings: list[tuple[str, str, str]] = field(default_factory=list)

    def say(self, key: str, kind: str, sentence: str) -> None:
        self.findings.append((key, kind, sentence))

    def unknown(self, key: str, known: frozenset[str], prefix: str = "") -> None:
        self.say(prefix + key, "unknown", f"{prefix}{key} is not a key that is read{nearest(key, known)}")


def read_file(path: str) -> dict[str, Any]:
    """Return a JSON or YAML file's mapping. Raises InputError that names the file, and the line if it is broken."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        content = yaml.safe_load(text)  # JSON is YAML, but for tabs
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{where}: not valid: {getattr(error, 'problem', error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no mapping of keys")
    return content


# ---------------------------------------------------------------------------------------------------- DeepSpeed


def read_deepspeed(content: dict[str, Any], path: str, ranks: int | None) -> Reading:
    """Return what a DeepSpeed configuration means. Raises InputError for values of the wrong kind."""
    found = Reading(path, ranks=ranks)
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
    checkpointing = content.get("activation_checkpointing")
    if checkpointing:
        found.say(
            "activation_checkpointing", "dead",
            "activation_checkpointing sets options of deepspeed.checkpointing; by itself it recomputes nothing: the "
            "model must call it (here: strategy.recompute=full)",
        )  # fmt: skip
    return found


def _precision(content: dict[str, Any], found: Reading) -> None:
    on = [k for k in ("fp16", "bf16", "bfloat16") if _enabled(content.get(k))]
    if len(on) > 1:
        found.say(on[0], "contradiction", f"{' and '.join(on)} are both enabled; DeepSpeed stops at that: keep one")
    for key in ("fp16", "bf16"):
        if isinstance(content.get(key), bool):
            found.say(key, "refused", f"{key}: {str(content[key]).lower()} must be a section: {{\"enabled\": {str(content[key]).lower()}}}")
    if on:
        found.precision = "fp16" if "fp16" in on and len(on) == 1 else "bf16"


def _enabled(section: Any) -> bool:
    return bool(section.get("enabled")) if isinstance(section, dict) else bool(section)


def _zero(zero: dict[str, Any], found: Reading) -> None:
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


def _batch(content: dict[str, Any], found: Reading) -> None:
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
                keys[0], "contradiction",
                f"train_batch_size {batch} is not micro-batch {micro} x accumulation {accumulation} x {ranks} ranks = "
                f"{micro * accumulation * ranks}; DeepSpeed stops at that",
            )  # fmt: skip
    elif batch and (micro or accumulation):
        known = micro or accumulation or 1
        third = batch / (known * ranks)
        name = "accumulation" if micro else "micro-batch"
        if third != int(third) or third < 1:
            unit = known * ranks
            below, above = max(unit, batch // unit * unit), -(-batch // unit) * unit
            choices = f"{above}" if below == above else f"{below} or {above}"
            found.say(
                keys[0], "contradiction",
                f"train_batch_size {batch} over {ranks} ranks and {'micro-batch' if micro else 'accumulation'} {known} leaves "
                f"{name} {third:.2f}; {choices} would divide",
            )  # fmt: skip
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


def read_accelerate(content: dict[str, Any], path: str) -> Reading:
    """Return what an Accelerate configuration means; follows deepspeed_config_file when it names one."""
    ranks = content.get("num_processes")
    found = Reading(path, ranks=ranks if isinstance(ranks, int) and ranks > 0 else None)
    for key in content:
        if key not in ACCELERATE:
            found.unknown(key, ACCELERATE)
    kind = content.get("distributed_type")
    deepspeed, fsdp = content.get("deepspeed_config") or {}, content.get("fsdp_config") or {}
    if kind is None:
        wanted = "DEEPSPEED" if deepspeed or any(k in ZERO for k in content) else "FSDP" if fsdp else "MULTI_GPU"
        found.say(
            "distributed_type", "refused",
            f"distributed_type is missing: accelerate launch refuses the file; add distributed_type: {wanted}",
        )  # fmt: skip
        kind = wanted
    precision = content.get("mixed_precision")
    if precision not in (None, "no", False):
        found.precision = str(precision)
    if "fp16" in content and precision not in (None, "no", False):
        found.say("fp16", "contradiction", f"fp16 and mixed_precision: {precision} are both given; only mixed_precision is read")
    if deepspeed and kind != "DEEPSPEED":
        found.say("deepspeed_config", "dead", f"deepspeed_config does nothing with distributed_type: {kind}")
    if fsdp and kind != "FSDP":
        found.say("fsdp_config", "dead", f"fsdp_config does nothing with distributed_type: {kind}")
    if kind == "DEEPSPEED":
        _accelerate_deepspeed(deepspeed, content, found)
    elif kind == "FSDP":
        _accelerate_fsdp(fsdp, found)
    return found


def _accelerate_deepspeed(section: dict[str, Any], content: dict[str, Any], found: Reading) -> None:
    file = section.get("deepspeed_config_file")
    if file:
        inner = read_deepspeed(read_file(str(Path(found.path).expanduser().parent / file)), str(file), found.ranks)
        for key in section:
            if key in ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
                       "offload_param_device", "zero3_save_16bit_model"):  # fmt: skip
                inner.say(key, "contradiction", f"deepspeed_config.{key} beside deepspeed_config_file: accelerate refuses both")
        inner.findings = found.findings + inner.findings
        inner.path, inner.precision = found.path, inner.precision or found.precision
        found.__dict__.update(inner.__dict__)
        return
    for key in section:
        if key in ACCELERATE_DEEPSPEED:
            continue
        if key in ZERO or key in DEEPSPEED:
            found.say(
                f"deepspeed_config.{key}", "dead",
                f"deepspeed_config.{key} belongs into a DeepSpeed JSON (deepspeed_config_file); accelerate's own section "
                "does not pass it on",
            )  # fmt: skip
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
        found.say("offload_param_device", "dead", f"offload_param_device acts in stage 3 only, and the stage is {found.zero}")
    elif weights != "none":
        found.offload_weights = weights
    if section.get("zero3_init_flag") and found.zero != 3:
        found.say("zero3_init_flag", "dead", f"zero3_init_flag acts in stage 3 only, and the stage is {found.zero}")
    steps = section.get("gradient_accumulation_steps")
    found.accumulation = steps if isinstance(steps, int) else None


def _accelerate_fsdp(section: dict[str, Any], found: Reading) -> None:
    for key in section:
        if key not in ACCELERATE_FSDP:
            found.unknown(key, ACCELERATE_FSDP, "fsdp_config.")
    version = section.get("fsdp_version", 1)
    strategy = str(section.get("fsdp_sharding_strategy", "FULL_SHARD"))
    if version == 2 and "fsdp_sharding_strategy" in section:
        found.say("fsdp_sharding_strategy", "dead", "fsdp_config.fsdp_sharding_strategy is FSDP1's; FSDP2 reads fsdp_reshard_after_forward")
        strategy = "FULL_SHARD"
    grad_only = "GRAD" in strategy or strategy == "2"
    if version == 2 and section.get("fsdp_reshard_after_forward") is False:
        grad_only = True
    found.zero = 0 if "NO_SHARD" in strategy or strategy == "3" else 2 if grad_only else 3
    if section.get("fsdp_offload_params"):
        found.offload_weights = found.offload_optimizer = "cpu"
    if section.get("fsdp_activation_checkpointing"):
        found.recompute = "full"


# ------------------------------------------------------------------------------------------------------- answer


def plan_from_files(
    name: str | None, overrides: list[str], deepspeed: str | None, accelerate: str | None, machine: dict[str, Any]
) -> dict[str, Any]:
    """Return the plan of what the files ask for, and beside it what the planner would choose itself.

    `read` holds printable lines, `findings` the keys that do nothing, contradict or are unknown. Without a model
    there is nothing to predict, and only these are returned.
    """
    from tercet.planner.answer import plan
    from tercet.planner.table import need_lines

    ranks = machine.get("ranks") or _count(machine.get("gpus"))
    if accelerate:
        found = read_accelerate(read_file(accelerate), accelerate)
        if deepspeed:
            inner = read_deepspeed(read_file(deepspeed), deepspeed, ranks or found.ranks)
            inner.findings = found.findings + inner.findings
            found = inner
    else:
        found = read_deepspeed(read_file(deepspeed or ""), deepspeed or "", ranks)
    ranks = ranks or found.ranks
    lines = reading_lines(found)
    common: dict[str, Any] = {
        "read": lines,
        "findings": [{"key": k, "kind": kind, "says": s} for k, kind, s in found.findings],
        "means": {k: v for k, v in found.__dict__.items() if k not in ("findings", "path")},
    }
    if name is None:
        return {**common, "strategies": [], "refused": [], "notes": ["name a model to see what this would take"], "assumed": []}
    if ranks and not machine.get("gpus"):
        machine = {**machine, "ranks": ranks}
    if found.batch and not machine.get("batch"):
        machine = {**machine, "batch": str(found.batch)}
    own = plan(name, list(overrides), **machine)
    asked = plan(name, [*overrides, *as_overrides(found)], **machine)
    first = asked["strategies"] + asked["refused"]
    taken = []
    for entry in first[:1]:
        need = {k: entry.get(k) for k in ("card_bytes", "host", "tokens_per_second")} if "card_bytes" in entry else None
        taken = need_lines({"would_need": need} if need else entry)
    return {**own, **common, "read": [*lines, *taken, "What the planner would take instead:"], "asked": first[:1]}


def _count(gpus: str | None) -> int | None:
    from tercet.spec.machine import parse_gpus

    return parse_gpus(gpus)[0] if gpus else None


def as_overrides(found: Reading) -> list[str]:
    """Return the reading as recipe overrides."""
    result = [f"strategy.zero={found.zero}", f"strategy.offload.optimizer={found.offload_optimizer}",
              f"strategy.offload.weights={found.offload_weights}"]  # fmt: skip
    if found.offload_optimizer != "none" or found.offload_weights != "none":
        result.append("strategy.engine=deepspeed")
    if found.micro_batch:
        result.append(f"strategy.micro_batch={found.micro_batch}")
    if found.recompute:
        result.append(f"strategy.recompute={found.recompute}")
    if found.precision in ("fp16", "bf16", "fp8"):
        result.append(f"train.precision={found.precision}")
    return result


def reading_lines(found: Reading) -> list[str]:
    words = [f"zero {found.zero}"]
    if found.offload_optimizer != "none":
        words.append(f"optimizer on {found.offload_optimizer}")
    if found.offload_weights != "none":
        words.append(f"weights on {found.offload_weights}")
    if found.precision:
        words.append(found.precision)
    if found.batch:
        words.append(f"batch {found.batch} = micro-batch {found.micro_batch} x accumulation {found.accumulation} x {found.ranks or 1} ranks")
    elif found.accumulation:
        words.append(f"accumulation {found.accumulation}")
    lines = [f"{found.path} means: {', '.join(words)}"]
    return lines + [f"  {kind}: {sentence}" for _, kind, sentence in found.findings]
