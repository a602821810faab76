"""Seconds per optimizer step, by row. Formulas and their sources: docs/concepts/planner.md.

Rows add up to the step: matmul, attention, elementwise, loss, dequantize, launch, optimizer, communication, host,
bubble. Each holds only what nothing else hides: communication that runs behind arithmetic is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tercet.planner import host as resident
from tercet.planner.constants import Constants
from tercet.planner.job import Job
from tercet.planner.ledger import tensors_at_peak
from tercet.spec.axes import data, shard, tensor
from tercet.spec.axes.traffic import Collective
from tercet.spec.blocks.cost import Matmul
from tercet.spec.counts import Counts, LayerKind
from tercet.spec.described import PASSES
from tercet.spec.machine import Machine
from tercet.spec.recompute import levels

ROWS: tuple[str, ...] = (
    "matmul",
    "attention",
    "elementwise",
    "loss",
    "dequantize",
    "launch",
    "optimizer",
    "communication",
    "host",
    "bubble",
)

# Kernels of one layer's forward, by how it is run: counted in transformers' Llama layer (two norms of six, four
# rotations of five, seven matmuls, attention with its reshapes, gate and residuals), and with chains fused.
LAYER_KERNELS = {"eager": 55, "native": 45, "compiled": 16, "fused": 14}
ADAPTER_KERNELS = 6  # dropout, two matmuls, cast, scale, add
BACKWARD_KERNELS = 2.0  # per forward kernel: each operation differentiates into about two

# Passes over numbers of width w and of the blocks' `elementwise` count, in bytes per number, forward only. Eager:
# each operation reads and writes memory, norms in fp32 (sum of their operations' operands); fused: once in, once out.
NORM_BYTES = {"eager": 42, "native": 34, "compiled": 8, "fused": 8}
CHAIN_BYTES = {"eager": 8, "native": 7, "compiled": 3, "fused": 3}
ELEMENTWISE_BACKWARD = 1.7  # times the forward's bytes

# Bytes per parameter that our own AdamW (engine/adamw.py) moves beyond a fused one's, its operators' operands summed:
# the update itself, codes read and written, rounding by chance.
ROWS_UPDATE_BYTES, CODES_BYTES, CHANCE_BYTES = 80, 110, 85
# Times the fused AdamW's seconds on a processor: 0.90 s against 0.009 s for 8.4 M numbers on one core of an AVX-512 one.
CODES_ON_HOST = 100

ATTENTION_BACKWARD = 2.5  # times the forward's FLOPs: five matmuls instead of two (arXiv 2205.14135)


@dataclass(frozen=True)
class Rates:
    """What one rank's processor reaches, per second."""

    matmul: float
    other_matmul: float  # head and attention stay in bf16 when matmuls are fp8 or int8
    attention: float
    memory: float
    host: float | None


def rates(job: Job, machine: Machine, c: Constants) -> Rates | None:
    """Return the processor's rates, or None when they are unknown (a CPU that nobody has measured)."""
    if machine.card is None:
        key = "matmul_fp32" if job.matmul == "fp32" else "matmul_bf16"
        if key not in machine.measured or "memory" not in machine.measured:
            return None
        share = c.cpu_share / machine.ranks  # measured with all cores; ranks share them
        rate, memory = machine.measured[key] * share, machine.measured["memory"] * share
        return Rates(rate, rate, rate * 0.3, memory, None)
    card = machine.card
    measured = machine.measured
    reached = (card.reached or 0.87) * (c.matmul_share_geforce if card.geforce else c.matmul_share)
    plain = card.plain_flops * min(reached, card.sustained)
    if "matmul_bf16" in measured:
        plain = measured["matmul_bf16"] * c.matmul_share
    kind = job.matmul
    if f"matmul_{kind}" in measured:
        rate = measured[f"matmul_{kind}"] * (c.fp8_share if kind == "fp8" else c.matmul_share)
    elif kind in ("fp8", "int8") and kind in card.flops:
        rate = card.flops[kind] * min(c.fp8_share if kind == "fp8" else c.int8_share, card.sustained)
    elif kind == "fp16_fast" and "fp16_fast" in card.flops:
        rate = max(plain, card.flops["fp16_fast"] * min(c.fast_share, card.sustained))
    elif kind == "fp32":
        rate = plain / 2  # TF32 tensor cores run at half of bf16's rate
    else:
        rate = plain
    attention = c.attention_share_hopper if card.arch == "Hopper" else c.attention_share
    links = machine.host_links()
    host = min((x for x in links if x), default=None)
    other = rate if kind in ("fp16_fast", "fp32") else plain
    memory = measured.get("memory", card.bandwidth * c.bandwidth_share)
    if host and "host_to_card" not in measured:
        host *= c.host_share
    return Rates(rate, other, plain * attention, memory, host)


def clock(counts: Counts, job: Job, machine: Machine, c: Constants) -> dict[str, float] | None:
    """Return seconds of one optimizer step by row, or None when the processor's rates are unknown."""
    speed = rates(job, machine, c)
    if speed is None:
        return None
    one = micro_batch(counts, job, speed, c)
    step = {row: one[row] * job.accumulation for row in ROWS}
    compute = sum(step.values())
    if job.host_resident:
        return _host_resident(counts, job, machine, step, speed, c)
    step["optimizer"] = optimizer_seconds(counts, job, machine, speed, c)
    if job.transport == "round-robin":
        return _round_robin(counts, job, machine, step, compute, speed, c)
    if job.pipeline > 1:
        # 1F1B waits (stages - 1) micro-batches at both ends together (arXiv 2104.04473).
        step = {row: v / job.pipeline if row in one else v for row, v in step.items()}
        compute /= job.pipeline
        step["bubble"] = compute * (job.pipeline - 1) / job.accumulation
    host = host_seconds(counts, job, speed, machine, c)
    step["host"] = _exposed(host, compute, c.overlap) + nvme_seconds(counts, job, machine, c)
    hidden, bare = communication_seconds(counts, job, machine, c)
    # What is left of the arithmetic after host copies can hide collectives.
    step["communication"] = bare + _exposed(hidden, max(0.0, compute - host), c.overlap)
    return step


def _host_resident(
    counts: Counts, job: Job, machine: Machine, step: dict[str, float], speed: Rates, c: Constants
) -> dict[str, float]:
    updates = machine.known("cpu_adam", c.cpu_adam)
    if job.state_blocks or job.rounds_by_chance:  # ours, whose passes through memory are more (optimizer_seconds)
        plain = 2 * 4 + 2 * 8 + 3 * 4 + 2
        updates *= plain / (
            plain + ROWS_UPDATE_BYTES + CODES_BYTES * job.state_blocks + CHANCE_BYTES * job.rounds_by_chance
        )
    step = resident.seconds(counts, job, step, speed.host, updates, PASSES * resident.carried(machine, c))
    _, bare = communication_seconds(counts, job, machine, c)
    return {**step, "communication": bare}


def _exposed(seconds: float, compute: float, overlap: float) -> float:
    """Return what computing does not hide: at least the share that never overlaps, at most all but `compute`."""
    return max(seconds * (1 - overlap), seconds - compute * overlap)


# ----------------------------------------------------------------------------------------------- one micro-batch


def micro_batch(counts: Counts, job: Job, speed: Rates, c: Constants) -> dict[str, float]:
    """Return seconds of one micro-batch's forward and backward on one rank, by row, without communication."""
    rows: dict[str, float] = dict.fromkeys(ROWS, 0.0)
    kernels = 0.0
    for kind in counts.kinds:
        for row, seconds in _layer(counts, kind, job, speed, c).items():
            rows[row] += seconds * kind.count / job.tensor
        kernels += kind.count * _kernels(kind, job)
    rows["loss"] = _loss(counts, job, speed, c)
    if not job.graphs:
        busy = sum(rows.values())
        launch = c.launch_seconds * (c.windows_launch if job.windows else 1.0)
        rows["launch"] = max(0.0, kernels * launch - busy)
    return rows


def _layer(counts: Counts, kind: LayerKind, job: Job, speed: Rates, c: Constants) -> dict[str, float]:
    tokens, again = job.tokens, _again(job, kind, {"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0})
    matmul = dequantize = 0.0
    for m in kind.matmuls:
        one = _matmul(m, tokens, job, speed, c)
        backward = 1.0 if counts.model.frozen else 2.0  # a frozen weight needs no gradient of its own
        matmul += one * (1 + again + backward)
        if job.quantized:
            # 0.5 byte in, 2 bytes out, and the matmul reads the 2: once forward, once again, once backward.
            dequantize += (2 + again) * m.weights * 2.5 * c.nf4_traffic / speed.memory
        if m.adapter_rank:
            flops = 2.0 * m.adapter_rank * (m.inner + m.outer) * m.rows * tokens
            traffic = tokens * (m.inner + m.outer) * m.rows * 2 * job.activation_bytes
            matmul += (3 + again) * (flops / speed.other_matmul + traffic / speed.memory)
    seen = job.sequence if kind.window is None else min(job.sequence, kind.window)
    context = seen / 2 if job.packed_attention and kind.window is None else seen
    flops = 2.0 * tokens * context * (kind.score_width + kind.value_width)
    attention = flops * (1 + again + ATTENTION_BACKWARD) / speed.attention
    numbers = kind.whole.elementwise
    size = job.activation_bytes / 2
    moved = tokens * (2 * NORM_BYTES[job.kernels] * counts.model.width + CHAIN_BYTES[job.kernels] * numbers) * size
    remade = _again(job, kind, {"none": 0.0})
    elementwise = moved * (1 + remade + ELEMENTWISE_BACKWARD) / speed.memory
    return {"matmul": matmul, "attention": attention, "elementwise": elementwise, "dequantize": dequantize}


def _again(job: Job, kind: LayerKind, share: dict[str, float]) -> float:
    """Return how much of a forward is run again, over a kind's layers; `share` by level, 1 where it says nothing."""
    each = levels(job.recompute, kind.numbers)
    return sum(n * share.get(level, 1.0) for level, n in each) / kind.count


def _matmul(m: Matmul, tokens: int, job: Job, speed: Rates, c: Constants) -> float:
    """Return seconds of one forward matmul: arithmetic plus the operand traffic that it does not hide.

    The additive roofline makes small and thin matmuls slow by their shape alone (few FLOPs per byte).
    """
    rate = speed.matmul * (c.expert_share if m.groups > 1 else 1.0)
    rows = tokens * m.rows
    operands = rows * (m.inner + m.outer) + m.weights
    return m.flops * tokens / rate + c.matmul_traffic * operands * job.activation_bytes / speed.memory


def _loss(counts: Counts, job: Job, speed: Rates, c: Constants) -> float:
    """Return seconds of head, softmax and their backward."""
    heads = 1 + len(counts.model.mtp)
    passes = 2.0 if counts.model.frozen else 3.0
    arithmetic = 2.0 * counts.head_parameters * job.tokens * passes / speed.other_matmul
    # Bytes moved per logit: fused keeps to about two passes in fp32, the full chain makes ten.
    per_logit = {"full": 40, "unshifted": 32, "chunked": 20, "fused": 14}[job.loss] if job.kernels != "fused" else 8
    return heads * (arithmetic + per_logit * job.tokens * counts.model.vocabulary / speed.memory)


def _kernels(kind: LayerKind, job: Job) -> float:
    forward = float(LAYER_KERNELS[job.kernels])
    forward += ADAPTER_KERNELS * sum(m.adapter_rank > 0 for m in kind.matmuls)
    if job.quantized:
        forward += 3 * len(kind.matmuls)
    again = _again(job, kind, {"none": 0.0})
    return forward * (1 + again + BACKWARD_KERNELS)


def optimizer_seconds(counts: Counts, job: Job, machine: Machine, speed: Rates, c: Constants) -> float:
    """Return seconds of clipping and updating what one rank owns (or of the host's update for all ranks)."""
    trained = counts.trained_parameters
    if "optimizer" in job.offload:
        # Asynchronous pipelines hide it (see _round_robin); a blocking one waits for the whole host.
        return 0.0 if job.transport == "round-robin" else host_update(counts, job, machine, c)
    own = trained / (job.shards if job.zero else 1)
    if machine.card is None and "cpu_adam" in machine.measured:  # measured with all cores, which the ranks share
        own *= CODES_ON_HOST if job.state_blocks else 1
        return own * machine.ranks / machine.measured["cpu_adam"]
    moved = 2 * (job.master_bytes or job.weight_bytes) + 2 * job.state_bytes + 3 * job.gradient_bytes + job.weight_bytes
    if job.state_blocks or job.rounds_by_chance:
        moved += ROWS_UPDATE_BYTES + CODES_BYTES * job.state_blocks + CHANCE_BYTES * job.rounds_by_chance
    return own * moved / speed.memory


# ------------------------------------------------------------------------------------------------ links and host


def bus(job: Job, machine: Machine, c: Constants) -> float | None:
    """Return the bytes per second of a ring over the ranks (NCCL's busbw), or None when unknown."""
    if "all_reduce" in machine.measured:
        return machine.measured["all_reduce"]
    if machine.card is None:
        return None
    link = min((x for x in machine.host_links() if x), default=None)
    if machine.nvlink and machine.card.nvlink:
        return machine.card.nvlink / 2 * c.peer_share
    if job.transport == "copies" and link:
        return link * c.copies_share
    # Every byte crosses two links and the host's memory, which all cards share; a narrow slot slows the ring.
    full = machine.card.host_link
    narrow = min(1.0, link / full) if link and full else 1.0
    staged = min(c.staged_bus * narrow, resident.carried(machine, c) / job.ranks)
    # With peer access NCCL has both ways, and takes the faster.
    return max(staged, link * c.peer_share) if machine.peers and link else staged


def collectives(counts: Counts, job: Job) -> list[Collective]:
    """Return the collectives of one optimizer step, as the axes describe them (spec/axes)."""
    found: list[Collective] = []
    if job.tensor > 1:
        row = job.tokens * counts.model.width * job.activation_bytes
        layers = max(1, len(counts.model.layers) // job.pipeline)
        found += tensor.traffic(layers, row, job.accumulation, job.recompute == "full")
    if job.shards == 1:
        return found
    found += counts.expert_traffic
    if job.host_resident:
        return found
    if counts.model.frozen:
        return found + _adapter_traffic(counts, job)
    if job.zero == 0:
        return found + data.traffic(counts, job.gradient_bytes)
    sent = shard.traffic(
        counts,
        job.shards,
        job.zero,
        job.accumulation,
        job.reduce_every_micro_batch,
        job.weight_bytes,
        job.gradient_bytes,
    )
    if job.deepspeed and job.zero < 3:
        # DeepSpeed's stages 1 and 2 reduce buckets that hold several ranks' parts, to all of them
        # (use_multi_rank_bucket_allreduce, true unless said otherwise: runtime/zero/stage_1_and_2.py).
        sent = [replace(x, kind="all_reduce") if x.what == "gradients" else x for x in sent]
    return found + sent


def _adapter_traffic(counts: Counts, job: Job) -> list[Collective]:
    trained = counts.trained_parameters
    groups = counts.blocks + 1
    found = [Collective("all_reduce", "gradients", 1, job.gradient_bytes * trained)]
    if job.zero == 3:
        inside = counts.parameters - counts.outside_parameters
        whole = job.frozen_bytes * inside + job.outer_frozen_bytes * counts.outside_parameters
        times = 2 * job.accumulation
        found.append(Collective("all_gather", "weights", times * groups, times * whole))
    return found


def communication_seconds(counts: Counts, job: Job, machine: Machine, c: Constants) -> tuple[float, float]:
    """Return (seconds that computing can hide, seconds that it cannot) of all collectives of a step."""
    found = collectives(counts, job)
    rate = bus(job, machine, c)
    if not found or (rate is None and not any(x.kind in machine.measured for x in found)):
        return 0.0, 0.0
    rate = rate or min(machine.measured[x.kind] for x in found if x.kind in machine.measured)
    hidden = 0.0
    number = sum(x.count for x in found if x.can_hide)
    bare = number * machine.measured.get("collective_latency", LATENCY[machine.kind]) * (1 - c.overlap)
    for sent in found:
        n = job.tensor if sent.what == "activations" else job.shards
        # A ring sends (n-1)/n of the payload, an all-reduce twice that (NVIDIA nccl-tests, PERFORMANCE.md).
        reduced = sent.kind == "all_reduce"
        seconds = sent.payload * (n - 1) / n / machine.measured.get(sent.kind, rate) * (2 if reduced else 1)
        if reduced and sent.can_hide:
            # Gradients are only complete in the last micro-batch's backward, or in each: two thirds of it hide them.
            each = job.reduce_every_micro_batch
            hideable_share = 0.67 if each else min(1.0, 0.67 / job.accumulation)
            hidden += seconds * hideable_share
            bare += seconds * (1 - hideable_share)
        elif sent.can_hide:
            hidden += seconds
        else:
            bare += seconds
    return hidden, bare


# Seconds until a tiny collective returns: cards through the host, as measured by p2pBandwidthLatencyTest (10 to 24 us
# per copy, a few copies each); gloo on one machine as `tercet doctor` finds it.
LATENCY = {"gpu": 40e-6, "cpu": 250e-6}


def host_seconds(counts: Counts, job: Job, speed: Rates, machine: Machine, c: Constants) -> float:
    """Return seconds that one card's link to the host is busy in a step."""
    if not job.offload or speed.host is None:
        return 0.0
    inside = counts.parameters
    moved = 0.0
    if "paged" in job.offload and machine.card is not None:
        # The driver keeps what has room on the card; the rest of the moments comes and goes at every step.
        moments = job.state_bytes * counts.trained_parameters
        room = max(0.0, machine.card.usable_bytes - tensors_at_peak(counts, job, c))
        moved += 2 * max(0.0, moments - room)
    if "weights" in job.offload:
        size = job.weight_bytes if not counts.model.frozen else job.frozen_bytes
        # Each rank fetches its shard (all of it when nothing is sharded), forward and backward.
        moved += 2 * job.accumulation * size * inside / (job.shards if job.zero == 3 else 1)
    trained = counts.trained_parameters
    own = trained / (job.shards if job.zero else 1)
    if job.host_shards:  # shards come, in the masters' format, to be gathered; gradients go as they are reduced
        gathers = 2 * job.accumulation if job.zero == 3 else 1
        reductions = job.accumulation if job.reduce_every_micro_batch else 1
        return (gathers * (job.master_bytes or job.weight_bytes) + reductions * job.gradient_bytes) * own / speed.host
    if "gradients" in job.offload:
        moved += job.accumulation * job.gradient_bytes * own
    if "optimizer" in job.offload:
        moved += (job.gradient_bytes + job.weight_bytes) * own  # gradients out, fresh weights in
    if "states" in job.offload:
        moved += 2 * (job.state_bytes + job.master_bytes) * own  # moments visit the card for the update
    if "activations" in job.offload:
        moved += 2 * job.accumulation * counts.entries * job.tokens * job.activation_bytes
    return moved / speed.host


def nvme_seconds(counts: Counts, job: Job, machine: Machine, c: Constants) -> float:
    """Return seconds of reading and writing files on the one drive that all ranks share; nothing hides them.

    Per parameter and step: masters and moments in and out, the gradient out and in; each weight in for forward and
    backward of every micro-batch, and out once.
    """
    if not job.nvme:
        return 0.0
    moved = 2.0 * (4 + job.state_bytes + job.gradient_bytes) * ("optimizer" in job.nvme)
    moved += (2 * job.accumulation + 1) * job.weight_bytes * ("weights" in job.nvme)
    return moved * counts.trained_parameters / machine.known("disk_write", c.nvme_rate)


def _round_robin(
    counts: Counts, job: Job, machine: Machine, step: dict[str, float], compute: float, speed: Rates, c: Constants
) -> dict[str, float]:
    """Host-resident weights, stages dealt to cards in turn: compute or each card's link, whichever is longer.

    `step` and `compute` are for a micro-batch stream that all cards share evenly. Weights cross the links twice
    a round (forward, backward) and gradients once, each over one card's link; rounds are `accumulation`.
    """
    inside = counts.parameters
    frozen = counts.model.frozen
    weights = (job.frozen_bytes if frozen else job.weight_bytes) * inside
    gradients = job.gradient_bytes * counts.trained_parameters
    rounds = max(1, job.accumulation // 10)
    moved = rounds * (2 * weights + gradients) / job.ranks
    host = moved / speed.host if speed.host else 0.0
    step = {**step, "bubble": compute * (1 / c.pipeline_share - 1), "optimizer": 0.0}
    step["host"] = max(0.0, host - compute / c.pipeline_share)
    if not frozen and "optimizer" in job.offload:
        step["host"] = max(step["host"], host_update(counts, job, machine, c) - compute / c.pipeline_share)
    return step


def host_update(counts: Counts, job: Job, machine: Machine, c: Constants) -> float:
    """Return seconds of the host's AdamW over all trained parameters, once; replicas each have their own."""
    copies = (job.shards if job.zero == 0 else 1) * (CODES_ON_HOST if job.state_blocks else 1)
    return copies * counts.trained_parameters / machine.known("cpu_adam", c.cpu_adam)


def step_seconds(rows: dict[str, float]) -> float:
    return sum(rows.values())


def model_flops(counts: Counts, job: Job) -> float:
    """Return FLOPs of a step as MFU counts them: 6 per parameter and token plus attention, no recompute.

    PaLM's definition (arXiv 2204.02311, appendix B), with causal attention's half not taken off. A frozen weight has
    no gradient, so it counts 4.
    """
    attention = sum(6.0 * job.sequence * (k.score_width + k.value_width) * k.count for k in counts.kinds)
    passes = 2 if counts.model.frozen else 3
    return (passes * counts.active_matmul_flops() + attention) * job.step_tokens
