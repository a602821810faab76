"""Published measurements: one row of bench/measurements.json -> model, Job and machine.

Words of a row ("zero3+cpu-offload", "full recompute per stage") become the Job's fields by the tables below, the
same for every source. Nothing here looks at a row's id, its source or its result.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tercet.errors import InputError
from tercet.planner.calibrate import PublishedRun
from tercet.planner.constants import COLLECTIVE_BYTES, CONTEXT_BYTES
from tercet.planner.job import NF4_BYTES, Job
from tercet.spec.adapter import AdaptedLayer
from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.mla import MLA
from tercet.spec.blocks.moe import MoE
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.machine import GIB, Machine, find_gpu, gpus
from tercet.spec.model import Layer, Model

# Cards that rows name without saying which variant, and what the surveyed pages meant.
VARIANTS = {"A100": "A100 SXM 80GB", "H100": "H100 SXM 80GB", "H200": "H200 SXM 141GB", "A6000": "RTX A6000"}

ADAPTERS = ("lora", "qlora")
PLANNER_MICRO = 2  # sequences, where a row says nothing: what most rows of such systems use

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def read_row(row: dict[str, Any]) -> PublishedRun:
    """Return the row as the planner's own terms. Never raises for a row: `why` holds the reason."""
    base = PublishedRun(
        id=str(row.get("id", "?")),
        source=str(row.get("source", "?")),
        model=None,
        job=None,
        machine=None,
        tokens_per_s=row.get("tokens_per_s"),
        memory_bytes=_memory(row),
        memory_kind=_memory_kind(row),
        foreign=is_foreign(row),
    )
    try:
        model, said = sized(row["model"])
        machine = machine_for(row)
        job, assumed = job_of(row, model)
        assumed += said
        if method_of(row) in ADAPTERS:
            rank = int(row.get("lora_rank") or 16)
            assumed += [] if row.get("lora_rank") else [f"LoRA rank {rank}"]
            model = adapted(model, rank, _targets(str(row.get("lora_targets") or "all")))
    except (KeyError, TypeError, ValueError, InputError) as error:
        message = error.message if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return replace(base, why=message)
    why = "the run itself ran out of memory" if row.get("oom") else None
    strategy = str(row.get("strategy", "")).lower()
    if "experts on cpu" in strategy:
        why = "experts computed on the host's CPU: the planner has no model of a CPU's matrix units"
    memory = _memory(row, machine)
    if base.tokens_per_s is None:
        speed, said = _derived_speed(row, model, machine, job)
        base, assumed = replace(base, tokens_per_s=speed), assumed + said
    return replace(base, model=model, job=job, machine=machine, memory_bytes=memory, assumed=tuple(assumed), why=why)


def _derived_speed(row: dict[str, Any], model: Model, machine: Machine, job: Job) -> tuple[float | None, list[str]]:
    """Return tokens/s of a row that gives TFLOP/s a card, a share of the card's peak, or seconds a step instead."""
    if row.get("step_time_s"):
        tokens = row.get("global_batch_tokens") or job.micro_batch * job.sequence * job.accumulation * job.ranks
        return tokens / row["step_time_s"], ["tokens/s from the time of a step"]
    reported = row.get("utilisation_reported")
    if not isinstance(reported, dict):
        return None, []
    name = str(reported.get("name", "")).lower()
    rate = reported.get("value") if "flops" in name else None
    if "mfu" in name and reported.get("pct") and machine.card is not None:
        rate = reported["pct"] / 100 * machine.card.flops["bf16"] / 1e12
    if rate is None:
        return None, []
    # Model FLOPs: forward and backward, without what is recomputed; an adapter's frozen matrices get no gradient. Causal
    # attention counted as such: so rows that print both agree within 0.4 %.
    passes = 2 if method_of(row) in ADAPTERS else 3
    per_token = passes * model.flops(job.sequence, job.sequence / 2) / job.sequence
    return rate * 1e12 * job.ranks / per_token, [
        f"tokens/s from {rate:.0f} model TFLOP/s a card, attention counted whole"
    ]


def is_foreign(row: dict[str, Any]) -> bool:
    """Whether hand-written kernels or another project's own pipeline made the figure, not plain PyTorch."""
    words = f"{row.get('strategy', '')} {row.get('compiled', '')} {row.get('attention_kernel', '')}".lower()
    return any(w in words for w in ("hand-written", "round-robin", "on cpu (amx)", "megatron", "copy-engine"))


# ------------------------------------------------------------------------------------------------------- model

COUNT_TOLERANCE = 0.03  # between a row's parameters and those of its sizes; rounded names differ by less


def sized(m: dict[str, Any]) -> tuple[Model, list[str]]:
    """Return the Model of a row's sizes, and what had to be assumed. Raises InputError when the row's own number of
    parameters does not come of them.

    A feed-forward of two matrices (GELU, ReLU) is a gated one of two thirds the width: as many parameters and FLOPs.
    """
    model, stated = model_of(m), float(m.get("params_b") or 0) * 1e9
    words = f"{m.get('activation') or ''} {m.get('ffn_kind') or ''} {m.get('note') or ''}".lower()
    two = model_of({**m, "ffn": round(int(m["ffn"]) * 2 / 3)})
    assumed = ["feed-forward of two matrices, counted as a gated one of two thirds the width"]
    if m.get("gated") is False or (re.search(r"gelu|relu(?!\w)|two matrices", words) and "geglu" not in words):
        model = two
    elif stated and _off(model, stated) > COUNT_TOLERANCE and _off(two, stated) <= COUNT_TOLERANCE:
        model, assumed = two, [f"{assumed[0]}: its number of parameters says so"]
    else:
        assumed = []
    if stated and _off(model, stated) > COUNT_TOLERANCE:
        raise InputError(
            f"its sizes are a model of {model.parameters / 1e9:.2f} B parameters, the row says {stated / 1e9:.2f} B"
        )
    return model, assumed


def _off(model: Model, parameters: float) -> float:
    return abs(model.parameters / parameters - 1)


def model_of(m: dict[str, Any]) -> Model:
    """Return the Model of a row's sizes. Raises KeyError for a missing one."""
    width, heads = int(m["hidden"]), int(m["heads"])
    moe = m.get("moe") or {}
    if moe.get("mla"):
        attention: Any = MLA(
            heads=heads,
            kv_rank=moe["kv_lora_rank"],
            nope_dim=moe["qk_nope"],
            rope_dim=moe["qk_rope"],
            value_dim=moe["v_head"],
            q_rank=moe.get("q_lora_rank"),
        )
    else:
        attention = GQA(heads, int(m.get("kv_heads") or heads), int(m.get("head_dim") or width // heads))
    dense = Layer(attention, SwiGLU(int(m["ffn"])))
    count = int(m["layers"])
    if moe.get("experts"):
        experts = MoE(moe["experts"], moe["top_k"], moe["expert_ffn"], moe.get("shared") or 0)
        first = int(moe.get("dense_layers") or 0)
        layers = (dense,) * first + (Layer(attention, experts),) * (count - first)
    else:
        layers = (dense,) * count
    return Model(
        family="llama",
        name=str(m.get("name", "")),
        vocabulary=int(m["vocab"]),
        width=width,
        layers=layers,
        tied=bool(m.get("tied_embeddings")),
        context_tokens=2**20,
    )


def adapted(model: Model, rank: int, targets: tuple[str, ...]) -> Model:
    """Return the model frozen, with adapters on every layer's matrices of these names; on experts too, as hand-written
    systems have them."""

    def with_adapters(layer: Layer) -> Layer:
        return AdaptedLayer(layer.attention, layer.feedforward, layer, rank, targets)

    return replace(
        model,
        frozen=True,
        layers=tuple(with_adapters(layer) for layer in model.layers),
        mtp=tuple(replace(block, layer=with_adapters(block.layer)) for block in model.mtp),
    )


def machine_for(row: dict[str, Any]) -> Machine:
    """Return the row's cards and links. Raises InputError for a card that is not in gpus.toml."""
    text = str(row["gpu"])
    name = VARIANTS.get(text.strip(), text)
    limited = re.search(r"limited (?:to )?(\d+) ?W", f"{text} {row.get('interconnect', '')}", re.I)
    # "H100 SXM 96GB HBM2e (power-limited 500W)": a variant of a known card.
    if name not in gpus():
        bare = re.sub(r"\((?!modified).*?\)", "", name).strip()
        try:
            card = find_gpu(bare)
        except InputError:
            card = find_gpu(re.sub(r"\d+ ?GB.*", "80GB" if "100" in bare else "", bare).strip())
    else:
        card = gpus()[name]
    if limited and card.watts:
        # Below its power limit a card's clock, and so its rate, falls about as the cube root of the power at
        # full load; reported 4090 limits (450 -> 300 W: -8 to -12 %) lie near that.
        share = (float(limited[1]) / card.watts) ** (1 / 3)
        card = replace(card, flops={k: v * share for k, v in card.flops.items()})
    words = str(row.get("interconnect") or "").lower()
    lanes = None
    if "slow pcie" in words or "older board" in words:
        lanes = (4,) * int(row["n_gpus"])
    found = re.search(r"\bx(\d+)\b", words)
    if found and int(found[1]) in (1, 2, 4, 8, 16):
        lanes = (int(found[1]),) * int(row["n_gpus"])
    peer = None
    if "no p2p" in words or "host memory" in words:
        peer = False
    elif "p2p" in words and "no " not in words:
        peer = True
    if "no nvlink" in words:
        card = replace(card, nvlink=None)
    size = re.search(r"\b(\d+) ?GB\b", text)
    if size and int(size[1]) > card.memory_bytes / GIB * 1.05:  # the same chip with more memory
        share = card.usable_bytes / card.memory_bytes
        card = replace(card, memory_bytes=int(size[1]) * GIB, usable_bytes=int(int(size[1]) * GIB * share))
    return Machine(ranks=int(row["n_gpus"]), card=card, lanes=lanes, peer_access=peer)


# --------------------------------------------------------------------------------------------------------- job


def job_of(row: dict[str, Any], model: Model) -> tuple[Job, list[str]]:
    """Return the Job and what had to be assumed. Raises KeyError for a row without its basic figures."""
    assumed: list[str] = []
    ranks = int(row["n_gpus"])
    strategy = str(row.get("strategy") or "single").lower()
    method = method_of(row)
    precision = str(row.get("precision") or "bf16").lower()
    optimizer = str(row.get("optimizer") or "adamw").lower()
    offload = _offload(row, strategy)
    robin = "round-robin" in strategy
    sequence, micro, accumulation = _triangle(row, ranks, strategy, assumed)
    matmul = _matmul(precision)
    kernels = _kernels(f"{row.get('compiled') or ''} {row.get('loss_kernel') or ''}", matmul)
    weight, master, gradient, state = _bytes(row, precision, optimizer, method, strategy)
    quantized = method == "qlora"
    outer = _outer_frozen(row, quantized)
    if "paged" in optimizer:
        offload |= {"paged"}  # moments in memory that the driver moves to the host
    if "optimizer" in offload and _deepspeed(strategy, optimizer):
        offload |= {"gradients"}  # ZeRO's offload moves each reduced gradient at once
    job = Job(
        ranks=ranks,
        micro_batch=micro,
        sequence=sequence,
        accumulation=accumulation,
        zero=_zero(strategy) if ranks > 1 else 0,
        weight_bytes=weight,
        master_bytes=master,
        gradient_bytes=gradient,
        state_bytes=state,
        matmul=matmul,
        frozen_bytes=NF4_BYTES if quantized else 2,
        outer_frozen_bytes=outer,
        # Behind fp32 norms and embeddings everything but the matmuls runs in fp32.
        activation_bytes=4 if outer == 4 else 2,
        quantized=quantized,
        recompute=_recompute(str(row.get("activation_checkpointing") or "none").lower()),
        kernels=kernels,
        loss=_loss(f"{row.get('loss_kernel') or ''} {row.get('compiled') or ''}", kernels, str(row.get("date") or "")),
        loss_chunks=_loss_chunks(row),
        offload=offload,
        # DeepSpeed reduces after every micro-batch; FSDP's training loops wait for the last (no_sync).
        reduce_every_micro_batch="fsdp" not in strategy and _zero(strategy) >= 2,
        step_in_backward="in backward" in optimizer,
        pipeline=_axis(r"\bpp(\d+)|(pipeline)", strategy, ranks) if not robin else 1,
        tensor=_axis(r"\btp-?(\d+)|(tensor.?parallel)", strategy, ranks),
        deepspeed=_deepspeed(strategy, optimizer),
        windows="windows" in str(row.get("notes") or "").lower(),
        graphs="cuda graphs" in str(row.get("compiled") or "").lower(),
        transport="round-robin" if robin else "copies" if _copies(row, strategy) else "collective",
    )
    return job, assumed


def method_of(row: dict[str, Any]) -> str:
    return str(row.get("method") or "full").lower()


def _axis(pattern: str, strategy: str, ranks: int) -> int:
    """Return an axis' size: "tp4" is 4; the bare word means all ranks."""
    found = re.search(pattern, strategy)
    if not found:
        return 1
    return min(ranks, int(found[1])) if found[1] else ranks


def _copies(row: dict[str, Any], strategy: str) -> bool:
    hand_written = "hand-written" in str(row.get("compiled") or "").lower()
    return "copy-engine" in strategy or (hand_written and "no nvlink" in str(row.get("interconnect") or "").lower())


def _triangle(row: dict[str, Any], ranks: int, strategy: str, assumed: list[str]) -> tuple[int, int, int]:
    sequence = row.get("seq_len")
    if sequence is None:
        sequence = 512
        assumed.append("sequence of 512 tokens")
    micro, accumulation, batch = row.get("micro_batch"), row.get("grad_accum"), row.get("global_batch_tokens")
    if micro is None:
        micro = PLANNER_MICRO
        assumed.append(f"micro-batch {micro}, the planner's choice")
    if accumulation is None:
        if batch is not None:
            accumulation = max(1, round(batch / (micro * sequence * ranks)))
        else:
            accumulation = 128 // micro if "round-robin" in strategy else 1
            assumed.append(f"{accumulation} micro-batches per step")
    return int(sequence), int(micro), int(accumulation)


def _deepspeed(strategy: str, optimizer: str) -> bool:
    """Whether DeepSpeed's ZeRO ran it, by its name or by its optimizer on the host."""
    return "deepspeed" in strategy or ("zero" in strategy and "offload" in strategy and "deepspeed" in optimizer)


def _zero(strategy: str) -> int:
    if found := re.search(r"zero-?(\d)", strategy):
        return int(found[1])
    return 3 if "fsdp" in strategy or "infinity" in strategy else 0


def _offload(row: dict[str, Any], strategy: str) -> frozenset[str]:
    words = f"{row.get('offload') or ''}".lower()
    found = set()
    if "everything" in words:
        found |= {"states", "weights", "gradients", "activations"}
    if re.search(r"\bm\b|m\+v|optimizer|states", words):
        found.add("states")
    if re.search(r"(?<!quantised )weights|params|quantised weights", words) and "sharded" not in words:
        found.add("weights")
    if re.search(r"gradients|grads", words) and "sharded" not in words:
        found.add("gradients")
    if "residuals" in words or ("activation" in words and "recomputed" not in words):
        found.add("activations")
    if "activation offload" in f"{row.get('activation_checkpointing') or ''}".lower():
        found.add("activations")
    if "cpu" in strategy or "cpu adam" in str(row.get("optimizer") or "").lower():
        if "offload" in strategy or "infinity" in strategy or "round-robin" in strategy:
            found.add("optimizer")
            found.discard("states")
        if "params" in strategy or "round-robin" in strategy:
            found.add("weights")
    if "params+grads" in words:
        found |= {"weights", "gradients"}
    return frozenset(found)


def _kernels(words: str, matmul: str) -> Any:
    words = words.lower()
    # Liger's patch replaces norms, rotations and gates together with the loss.
    if any(w in words for w in ("hand-written", "triton", "te +", "transformer engine", "unsloth", "liger")):
        return "fused"
    # torchao's fp8 and int8 training exists under torch.compile only.
    return "compiled" if "compile" in words or "true" in words or matmul in ("fp8", "int8") else "eager"


UNSHIFTED_SINCE = "2025"  # transformers 4.45 to 4.48 (autumn 2024) stopped to copy the logits for the shift


def _loss(words: str, kernels: str, date: str) -> Any:
    words = words.lower()
    if kernels == "eager" and not words.replace("false", "").strip() and date >= UNSHIFTED_SINCE:
        return "unshifted"
    if "full" in words or ("per block" in words and "chunk" not in words and "fused" not in words):
        return "full"  # what is compiled per block leaves the loss as it is written
    if "fused" in words or "liger" in words or kernels == "fused":
        return "fused"
    return "chunked" if "chunk" in words else "full" if kernels == "eager" else "chunked"


def _loss_chunks(row: dict[str, Any]) -> int | None:
    found = re.search(r"chunks=(\d+)", str(row.get("loss_kernel") or ""))
    if found:
        return int(found[1])
    # A hand-written loss that names no chunks makes the logits of a micro-batch in one piece.
    return 1 if "hand-written" in str(row.get("compiled") or "").lower() else None


def _recompute(words: str) -> str:
    if any(w in words for w in ("full", "whole block", "ffn+att")) or words in ("on", "true", "yes"):
        return "full"
    if "every other" in words:
        return "half"
    # "recompute norm", "swiglu", "ffn+norm", "selective (every other op)": part of a layer.
    return "selective" if any(w in words for w in ("norm", "swiglu", "ffn", "selective")) else "none"


def _matmul(precision: str) -> str:
    for word, key in (
        ("fp8", "fp8"),
        ("float8", "fp8"),
        ("int8", "int8"),
        ("fp16 acc", "fp16_fast"),
        ("fp16", "fp16"),
        ("fp32", "fp32"),
    ):
        if word in precision:
            return "bf16" if key == "fp32" and "bf16" in precision else key
    return "bf16"


def _bytes(
    row: dict[str, Any], precision: str, optimizer: str, method: str, strategy: str
) -> tuple[float, float, float, float]:
    """Return bytes per trained parameter of weight, master, gradient and optimizer state."""
    notes = f"{row.get('master_and_grad_dtype') or ''} {optimizer} {precision}".lower()
    state = 2.0 if "8bit" in optimizer else 4.0 if "bf16 m and v" in notes or "bf16 states" in notes else 8.0
    if "(bf16)" in optimizer:
        state = 4.0
    if method in ADAPTERS:
        return 4, 0, 4, min(state, 8.0)  # adapters are trained in fp32
    if "deepspeed" in strategy:
        return 2, 4, 2, state  # ZeRO keeps fp32 masters beside 16-bit weights, and reduces in 16 bits
    if "fp32 master" in notes or "mixed" in precision:
        return 2, 4, 4, state
    if "master" in notes and ("fp8" in precision or "bf16_master" in notes):
        return 2, 2 if "bf16_master" in notes or "separate master" in notes else 4, 2, state
    if "fp16" in precision and "cpu adam" not in optimizer and "fsdp" in strategy:
        return 2, 4, 2, state
    # Weights, gradients and moments in the weights' own format: what "bf16" means in torchtune and LLMQ.
    return 2, 0, 2, min(state, 4.0) if "8bit" not in optimizer and method != "pretrain" else state


def _targets(words: str) -> tuple[str, ...]:
    words = words.lower()
    if "all" in words:
        return ALL_LINEAR
    if words.strip() == "attention":
        return ATTENTION
    found = [f"{p.strip()}_proj" for p in re.split(r"[,+ ]+", words) if p.strip()]
    return tuple(f.replace("_proj_proj", "_proj") for f in found)


def _outer_frozen(row: dict[str, Any], quantized: bool) -> float:
    # PEFT's preparation for quantised training raises embedding, norms and head to fp32; others keep 2 bytes.
    notes = str(row.get("notes") or "").lower()
    return 4.0 if quantized and "fp32" in notes else 2.0


# ------------------------------------------------------------------------------------------------------- memory


def _memory(row: dict[str, Any], machine: Machine | None = None) -> float | None:
    value = row.get("peak_mem_gb_per_gpu")
    if row.get("longest_step") and machine is not None and machine.card is not None:
        # The longest sequence that ran, in such steps: with it the tensors filled what the driver leaves.
        room = machine.card.usable_bytes - CONTEXT_BYTES - COLLECTIVE_BYTES * (machine.ranks > 1)
        return room * (row["seq_len"] + row["longest_step"] / 2) / (row["seq_len"] + row["longest_step"])
    if value is None:
        return None
    unit = str(row.get("peak_mem_unit") or "GB")
    return value * (GIB if unit.startswith("GiB") else 1e9)


def _memory_kind(row: dict[str, Any]) -> str:
    words = str(row.get("mem_kind") or "").lower()
    for kind in ("reserved", "active", "allocated"):
        if words.startswith((kind, f"torch {kind}", f"peak {kind}")):
            return kind
    if "total" in words:
        return "total"
    # "peak memory reported by recipe": torchtune prints active, reserved and allocated; its table does not say which.
    return "active" if "active" in words else "allocated"
