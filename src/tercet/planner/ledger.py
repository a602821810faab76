"""Bytes per rank, by row and moment. Formulas and their sources: docs/concepts/planner.md.

Rows on the card: weights, master, gradients, optimizer, activations, logits, buffers, reserve. On the host:
states, pinned, inputs, loading. On disk: checkpoint, export, swap (what is kept on nvme). The first four are exact for the native engine
(tests/twins hold them to engine.memory()); the others are estimates, and logits and buffers upper bounds. Under
DeepSpeed buffers are what its engine holds (same tests), within rounding; activations are an upper bound there.
"""

from __future__ import annotations

from tercet.planner import host as resident
from tercet.planner.constants import COLLECTIVE_BYTES, CONTEXT_BYTES, Constants, load
from tercet.planner.job import Job, of_strategy
from tercet.spec import deepspeed as limits
from tercet.spec.blocks.cost import Kept
from tercet.spec.counts import Counts, LayerKind
from tercet.spec.model import Model
from tercet.spec.objective import CHUNK_TOKENS
from tercet.spec.recompute import levels
from tercet.spec.saving import PIECE_BYTES, copies_fit
from tercet.spec.strategy import Strategy, Work

STATE_ROWS = ("weights", "master", "gradients", "optimizer")
CARD_ROWS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
HOST_ROWS = ("states", "pinned", "inputs", "loading")
DEEPSPEED_REDUCED = 500_000_000  # elements; MEMORY_OPT_ALLREDUCE_SIZE in DeepSpeed's runtime/engine.py

# A Python process that has imported torch and holds a tiny model, without its tensors: measured on CPU builds
# of torch 2.13. It counts where ranks live in host memory.
PROCESS_BYTES = 500 * 10**6

Rows = dict[str, int]


def ledger_for(
    model: Model | Counts, strategy: Strategy, work: Work, rank: int = 0, on_gpu: bool = False
) -> dict[str, Rows]:
    """Return {"between_steps": rows, "peak": rows} of one rank under the native engine, in bytes."""
    counts = model if isinstance(model, Counts) else Counts(model)
    job = of_strategy(strategy, work, counts.model.module)
    return moments(counts, job, load(), rank, on_gpu)


def moments(counts: Counts, job: Job, constants: Constants, rank: int = 0, on_gpu: bool = True) -> dict[str, Rows]:
    if job.host_resident:
        return _host_moments(counts, job, constants, on_gpu)
    held = states(counts, job, rank)
    peak = {**held["peak"], **working(counts, job, constants, on_gpu)}
    standing = deepspeed_buffers(counts, job, on_gpu)[0] if job.deepspeed else 0.0
    between = {**held["between_steps"], "activations": 0, "logits": 0, "buffers": standing}
    for rows in (between, peak):
        rows["reserve"] = reserve(rows, job, constants, on_gpu)
    return {
        name: {row: int(rows[row]) for row in CARD_ROWS} for name, rows in (("between_steps", between), ("peak", peak))
    }


def _host_moments(counts: Counts, job: Job, constants: Constants, on_gpu: bool) -> dict[str, Rows]:
    """Return the rows where weights live on the host: between steps a card holds nothing."""
    layer = max(_one_layer(counts, kind, job, on_gpu) for kind in counts.kinds) * job.tokens
    peak = resident.card(counts, job, layer, logit_bytes(counts, job, constants), on_gpu)
    found = {}
    for name, rows in (("between_steps", dict.fromkeys(peak, 0.0)), ("peak", peak)):
        rows["reserve"] = reserve(rows, job, constants, on_gpu)
        found[name] = {row: int(rows[row]) for row in CARD_ROWS}
    return found


def states(counts: Counts, job: Job, rank: int = 0) -> dict[str, dict[str, float]]:
    """Return weights, master, gradients and optimizer at both moments: sums over placements (spec/placement.py).

    Exact for the native engine. zero 0: everything whole; gradients are one flat fp32 buffer for the engine's life.
    zero 1 to 3: parameters (fp32) are stored padded to the first rank's rows; AdamW's two moments follow the rows
    really held. Between steps only shards remain. At the peak zero 1 and 2 hold the gathered weights, and reduction
    once per step holds whole gradients from the first micro-batch to the last.
    """
    peak: dict[str, float] = dict.fromkeys(STATE_ROWS, 0.0)
    between = dict(peak)
    for (row, place, stays), size in counts.placed(job.rules(counts.model.frozen, rank)).items():
        if place == "card":
            peak[row] += size
            between[row] += size if stays else 0.0
    return {"between_steps": between, "peak": peak}


def away_from_cards(counts: Counts, job: Job) -> dict[str, float]:
    """Return what all ranks together place elsewhere: host states, host gradients, files.

    Of weights each part is there once, however many ranks read it; gradients and states are each rank's own.
    """
    rules = job.rules(counts.model.frozen)
    whole = rules.cut != "rows" and not rules.cut_weights
    found = {"states": 0.0, "gradients": 0.0, "files": 0.0}
    for (row, place, _), size in counts.placed(rules).items():
        if place == "card":
            continue
        ranks = 1 if row == "weights" and whole else job.shards
        kind = "files" if place == "file" else "gradients" if row == "gradients" else "states"
        found[kind] += size * ranks
    return found


def tensors_at_peak(counts: Counts, job: Job, constants: Constants) -> float:
    """Return the bytes of all tensors at the highest moment of a step, for any system.

    Either backward begins (all activations, and gradients only if earlier micro-batches left some) or it ends
    (all gradients, one layer's leftovers).
    """
    held, work = states(counts, job)["peak"], working(counts, job, constants)
    early = held["gradients"] if job.accumulation > 1 or job.flat_buffers else 0.0
    begin = sum(held.values()) - held["gradients"] + early + sum(work.values())
    _, _, last = gather_buffers(counts, job)
    root = job.weight_bytes * counts.outside_parameters if job.zero == 3 and job.shards > 1 else 0.0
    if counts.model.frozen:
        root = gather_buffers(counts, job)[0]
    end = sum(held.values()) + root + last + layer_ends(counts, job)
    return max(begin, end)


def layer_ends(counts: Counts, job: Job) -> float:
    """Return the embedding's row, the final norm's input and output, and each further prediction's output."""
    return (3 + len(counts.model.mtp)) * job.tokens * counts.model.width * job.activation_bytes


# ------------------------------------------------------------------------------------------------ what work needs


def working(counts: Counts, job: Job, constants: Constants, on_gpu: bool = True) -> dict[str, float]:
    """Return activations, logits and buffers at their highest: when backward begins."""
    scale = 1.0 if job.kernels in ("native", "fused") else constants.activation_scale
    kept = scale * sum(_kind_bytes(counts, k, job, on_gpu) for k in counts.kinds) * job.tokens
    kept /= job.tensor * job.pipeline
    if job.pipeline > 1:
        # 1F1B keeps as many micro-batches as there are stages (arXiv 2104.04473).
        kept *= min(job.pipeline, job.accumulation)
    if "activations" in job.offload and job.recompute == "full":
        kept = min(kept, 2 * job.tokens * counts.model.width * job.activation_bytes)
    ends = layer_ends(counts, job)
    logits = logit_bytes(counts, job, constants)
    one = max(_one_layer(counts, k, job, on_gpu) for k in counts.kinds) * job.tokens * scale / job.tensor
    if job.deepspeed:
        # What it holds is one row. What a layer's backward needs beyond the logits' room, and the copies that a
        # reduction makes and frees, count with what else the step itself makes and frees.
        standing, passing, freed = deepspeed_buffers(counts, job, on_gpu)
        kept += max(one - logits, 0.0) + freed
        return {"activations": kept + ends, "logits": logits, "buffers": standing + passing}
    gathered, leaving, last = gather_buffers(counts, job)
    # Three moments: the loss is made; a layer runs backward, and uses the room that the logits have left; the
    # tensors outside the layers are reduced when the activations are gone.
    at = (gathered + logits, gathered + one + leaving, gathered + last - kept)
    return {
        "activations": kept + ends,
        "logits": logits,
        "buffers": max(max(at) - logits, 0.0),
    }


def _kind_bytes(counts: Counts, kind: LayerKind, job: Job, on_gpu: bool) -> float:
    """Return what all layers of a kind keep per token, each at its own level of recomputation."""
    each = levels(job.recompute, kind.numbers)
    return sum(n * layer_bytes(counts, kind, job, level, on_gpu) for level, n in each)


def layer_bytes(counts: Counts, kind: LayerKind, job: Job, recompute: str, on_gpu: bool = True) -> float:
    """Return what a layer keeps per token between forward and backward."""
    width, size = counts.model.width, job.activation_bytes
    attention, feedforward = kind.attention, kind.feedforward
    whole = kind.whole if on_gpu and size == 2 else kind.looped
    if recompute == "full":
        return kind.entries * size
    if recompute == "half":  # every other matmul's result, and attention's (torchtitan's selective-op policy)
        half = (attention.outputs - kind.value_width + feedforward.outputs + 2 * width) / 2
        return (width + kind.value_width + half) * size + 4 * attention.stats
    if recompute == "selective":
        # Results of matmuls and attention; norms, rotations and gates are computed again.
        return (kind.entries + whole.selected) * size + 4 * whole.selected_stats
    if not counts.model.frozen:
        inputs, products = whole.inputs * size, whole.products * size
    else:
        inputs, products = _adapter_kept(kind, attention, feedforward, job)
    kept = inputs + whole.outputs * size + products + 4 * whole.stats + (4 * whole.widened if size != 4 else 0)
    if job.kernels == "eager":
        # transformers' RMSNorm keeps x in fp32 and the normed row besides the weighted one; silu(gate) is kept.
        return kept + 8 * width + feedforward.products * size
    return kept


def _adapter_kept(kind: LayerKind, attention: Kept, feedforward: Kept, job: Job) -> tuple[float, float]:
    """A frozen matmul needs only its weight in backward; an adapted one keeps its input, in fp32 for A."""
    names = [m.name for m in kind.matmuls if m.adapter_rank]
    size = job.activation_bytes + (4 if job.kernels == "eager" else 0)
    inputs = attention.inputs * size if any(n[0] in "qkv" for n in names) else 0
    inputs += feedforward.inputs * size if any(n.startswith(("gate", "up")) for n in names) else 0
    products = feedforward.products * size if any(n.startswith("down") for n in names) else 0
    return inputs, products


def _one_layer(counts: Counts, kind: LayerKind, job: Job, on_gpu: bool) -> float:
    """Return bytes per token that exist only while one layer runs backward."""
    size, width = job.activation_bytes, counts.model.width
    again = 0.0 if job.recompute == "none" else layer_bytes(counts, kind, job, "none", on_gpu)
    gradients = (2 * width + kind.feedforward.outputs + 2 * kind.feedforward.products) * size
    if job.kernels == "fused":
        # Hand-written gates keep no product and write the gradients of gate and up over them (Liger's swiglu.py).
        again -= kind.feedforward.products * size if again else 0.0
        gradients = (2 * width + kind.feedforward.products) * size
    norms = 3 * 4 * width  # fp32 copies inside a norm's backward
    return again + max(gradients, norms)


def logit_bytes(counts: Counts, job: Job, constants: Constants) -> float:
    """Return the loss's workspace: logits of one chunk, and the head's weight gradient where it is made."""
    vocabulary, size = counts.model.vocabulary, job.activation_bytes
    if job.loss in ("full", "unshifted"):
        copy = 4 if job.loss == "unshifted" else 0
        return job.tokens * vocabulary * (constants.full_logits_bytes - copy)
    if job.loss == "chunked":  # chunks, or a compiled chain: logits and their gradient in the working format
        return job.tokens * vocabulary * constants.chunked_logits_bytes
    part = min(job.tokens, CHUNK_TOKENS) if job.loss_chunks is None else job.tokens / job.loss_chunks
    chunk = part * vocabulary
    if job.kernels == "fused":
        return chunk * size
    if counts.model.frozen:
        return chunk * (4 + 2 * size)
    head = counts.head_parameters
    # Forward: fp32 sum of the weight's gradient, with logits and their logarithms of probabilities in fp32; later a
    # chunk's product for the sum, with the logits' gradient in fp32, and in the working format if that is another.
    # Backward: the sum, its multiple, and the multiple in that format.
    extra = size if size != 4 else 0
    one = max(4 * head + 8 * chunk, (4 + size) * head + chunk * (4 + extra), (8 + extra) * head)
    return one + 4 * head * len(counts.model.mtp)  # every further prediction's loss waits with a sum of its own


def gather_buffers(counts: Counts, job: Job) -> tuple[float, float, float]:
    """Return bytes of (weights gathered beyond the row `weights`, a layer's gradients on their way, the last ones).

    A gradient exists twice on its way into shards: as backward makes it and in the reduction's format. The last
    group to leave is what lies outside the layers: embedding, final norm, head.
    """
    if job.deepspeed:
        return deepspeed_buffers(counts, job, True)[1], 0.0, 0.0
    if job.shards == 1:
        if "weights" in job.offload:  # two layers come and go
            return job.weight_bytes * (2 * counts.largest_layer + counts.head_parameters), 0.0, 0.0
        return 0.0, 0.0, 0.0
    largest, outside = counts.largest_layer, counts.outside_parameters
    if counts.model.frozen:
        if job.zero < 3:
            return 0.0, 0.0, 0.0
        return 2 * job.frozen_bytes * largest + job.outer_frozen_bytes * outside, 0.0, 0.0
    if job.zero == 0:
        buckets = 0.0 if job.flat_buffers else job.gradient_bytes * counts.parameters  # DDP's
        return buckets, 0.0, 0.0
    gathered = job.weight_bytes * (2 * largest + outside) if job.zero == 3 else 0.0
    twice = job.weight_bytes + job.gradient_bytes
    return gathered, twice * largest, twice * outside


def deepspeed_buffers(counts: Counts, job: Job, on_gpu: bool) -> tuple[float, float, float]:
    """Return bytes of DeepSpeed's buffers: (held between steps too, held during a step, made and freed by a reduction).

    Gradients are laid end to end in a bucket and reduced in fp32 when it is full (its stage_1_and_2.py and stage3.py);
    stage 0 and stage 1's bf16 optimizer reduce them after backward (its engine.py, buffered_allreduce_fallback).
    """
    bucket = min(job.bucket or limits.LARGEST_BUCKET, counts.parameters)
    narrow = job.gradient_bytes < 4  # added up and sent in the weights' format, as DeepSpeed does unless told otherwise
    if job.zero == 3:
        # The bucket stands; what it sends is put together anew. A weight is kept until so many others have been used.
        near = 2 * counts.largest_layer + counts.outside_parameters
        live = near if "weights" in job.nvme else max(2 * counts.largest_layer, limits.LIVE)
        sent = job.gradient_bytes * bucket
        return sent, job.weight_bytes * min(live, counts.parameters), sent
    # Sent is a flat copy in fp32; of gradients in fewer bits there is one in these besides.
    fp32_sums = job.zero == 1 and bool(job.master_bytes) and not narrow  # stage 1's bf16 optimizer
    freed = 4.0 if fp32_sums or job.weight_bytes == 4 else (0.0 if narrow else 4.0) + job.weight_bytes
    if fp32_sums or job.zero == 0:  # no buckets: up to so many gradients are sent at once
        return 0.0, 0.0, freed * min(DEEPSPEED_REDUCED, counts.parameters)
    count = 2 if on_gpu and job.ranks > 1 else 1  # one is filled while another is sent
    leaving = job.weight_bytes * counts.largest_tensor if "optimizer" in job.offload else 0.0
    return leaving, count * job.weight_bytes * bucket, freed * bucket


def reserve(rows: dict[str, float], job: Job, constants: Constants, on_gpu: bool) -> float:
    """Return what is neither ours nor free: the allocator's unused pieces, the driver's context, NCCL."""
    if not on_gpu:
        # The process itself, and freed blocks that the C library keeps.
        work = sum(rows.get(row, 0) for row in ("activations", "logits", "buffers"))
        return constants.cpu_process_bytes + constants.cpu_heap_share * work
    allocated = sum(v for k, v in rows.items() if k != "reserve")
    return constants.reserve_share * allocated + CONTEXT_BYTES + (COLLECTIVE_BYTES if job.ranks > 1 else 0)


# ----------------------------------------------------------------------------------------- phases, host and disk


def phases(counts: Counts, job: Job, constants: Constants, rank: int = 0, on_gpu: bool = True) -> dict[str, int]:
    """Return the bytes of one rank in each phase of a run; the largest is what must fit."""
    both = moments(counts, job, constants, rank, on_gpu)
    between, peak = (sum(both[m].values()) for m in ("between_steps", "peak"))
    tensor = 4 * counts.largest_tensor  # load and save stream tensor by tensor
    forward = 4 * job.tokens * counts.model.width * job.activation_bytes + min(
        job.tokens, CHUNK_TOKENS
    ) * counts.model.vocabulary * (4 + job.activation_bytes)
    gathered = both["peak"]["weights"] - both["between_steps"]["weights"] if job.zero in (1, 2) else 0
    if job.host_resident and on_gpu:  # embedding, end, and two blocks
        sizes = counts.host_sizes
        gathered = job.weight_bytes * (sizes.begin + sizes.end + 2 * max(sizes.blocks))
    return {
        "load": int(between + tensor),
        "backward": int(peak),
        "step": int(between + both["peak"]["gradients"] - both["between_steps"]["gradients"]),
        "evaluation": int(between + forward + gathered + (gather_buffers(counts, job)[0] if job.zero == 3 else 0)),
        "save": int(between + tensor),
        "resume": int(between + tensor),
    }


def save_copies(counts: Counts, job: Job, machine_is_cpu: bool) -> float:
    """Return the bytes of all ranks that a save copies to the host when it is written behind the next steps.

    None where the state lies on the host already, or in files: it is written from there, at once.
    """
    if machine_is_cpu or "optimizer" in job.offload or job.host_shards:
        return 0.0
    return (max(job.master_bytes, job.weight_bytes, 4) + job.state_bytes) * counts.trained_parameters


def saves_behind(counts: Counts, job: Job, machine_is_cpu: bool, host_bytes: int | None) -> bool:
    """Return whether saves go on behind the next steps; `host_bytes`: the machine's RAM, None when not known."""
    copies = save_copies(counts, job, machine_is_cpu)
    others = sum(host_rows(counts, job, machine_is_cpu, host_bytes=0).values())
    return copies > 0 and (host_bytes is None or copies_fit(copies, host_bytes - others))


def host_rows(counts: Counts, job: Job, machine_is_cpu: bool, host_bytes: int | None = None) -> Rows:
    """Return host memory of the whole machine: offloaded states, what pinning adds, loader, loading and saving.

    `loading` is what passes through while weights are read or a save is written, which is never at once: a save's
    copies whole where a machine with `host_bytes` of RAM has room for them, or else pieces of them.
    """
    trained = counts.trained_parameters
    batch = 8 * 4 * job.micro_batch * job.sequence * job.ranks  # a few int32 batches ahead, per rank
    loading = 4.0 * counts.largest_tensor * job.ranks
    process = 0 if machine_is_cpu else PROCESS_BYTES * (job.ranks + 1)
    if job.host_resident:
        states, pinned = resident.host(counts, job, job.rules(counts.model.frozen), not machine_is_cpu)
        inputs = int(batch + process)
        return {"states": int(states), "pinned": int(pinned), "inputs": inputs, "loading": int(loading)}
    elsewhere = away_from_cards(counts, job)
    residuals = 0.0
    if "activations" in job.offload:
        residuals = counts.entries * job.tokens * job.activation_bytes * job.ranks
    # Copies pass through pinned memory: gradients on their way to the host's optimizer (fp32), fetched weights.
    # PyTorch rounds a pinned block up to a power of two: between nothing and as much again, half on average.
    rounded = "weights" in job.offload - job.nvme and not machine_is_cpu
    pinned = 0.5 * (job.weight_bytes * trained if rounded else 0) + residuals
    pinned += elsewhere["gradients"]
    if job.deepspeed and "optimizer" in job.offload:
        # Stage 3 adds gradients up there before it hands them to the optimizer; stages 1 and 2 cast the new weights.
        twice = 4 if job.zero == 3 and "optimizer" not in job.nvme else 0 if job.zero == 3 else job.weight_bytes
        pinned += twice * trained + (job.weight_bytes * counts.largest_tensor * job.ranks if job.zero < 3 else 0)
        if job.zero < 3 and job.accumulation > 1 and (not job.master_bytes or job.gradient_bytes < 4):
            pinned += job.weight_bytes * trained  # micro-batches are added up there
    if job.host_shards and not machine_is_cpu:  # masters and gradients are pinned, tensor by tensor
        pinned += 0.5 * (max(job.master_bytes, job.weight_bytes) + job.gradient_bytes) * trained
    if job.nvme:
        pinned += nvme_buffers(counts, job) * job.ranks
    if copies := save_copies(counts, job, machine_is_cpu):
        whole = host_bytes is None or (host_bytes > 0 and saves_behind(counts, job, machine_is_cpu, host_bytes))
        pieces = max(PIECE_BYTES, 4 * counts.largest_tensor) * job.ranks
        loading = max(loading, copies if whole else min(copies, pieces))
    return {
        "states": int(elsewhere["states"]),
        "pinned": int(pinned),
        "inputs": int(batch + process),
        "loading": int(loading),
    }


def nvme_buffers(counts: Counts, job: Job) -> float:
    """Return one rank's host memory that files are read into and written from (DeepSpeed's swap_tensor package).

    Four fp32 buffers of the largest weight's part for the optimizer; for weights, some of the same size, and one weight
    whole on its way back.
    """
    part = -(-counts.largest_tensor // job.shards)
    found = 4.0 * 4 * part if "optimizer" in job.nvme else 0.0
    if "weights" in job.nvme:
        found += job.weight_bytes * (limits.NVME_WEIGHT_BUFFERS * part + counts.largest_tensor)
    return found


def swap_bytes(counts: Counts, job: Job) -> float:
    """Return the files' bytes: fp32 masters, moments and gradients; the weights' own."""
    per_parameter = (4 + job.state_bytes + job.gradient_bytes) * ("optimizer" in job.nvme)
    return (per_parameter + job.weight_bytes * ("weights" in job.nvme)) * counts.trained_parameters


def save_bytes(trained_parameters: int, job: Job) -> float:
    """Return a checkpoint's bytes: what the optimizer updates, fp32 unless there are no masters, and its moments."""
    return (max(job.master_bytes, job.weight_bytes) + job.state_bytes) * trained_parameters


def disk_rows(counts: Counts, job: Job, keep: int, model_bytes: float) -> Rows:
    """Return disk of checkpoints (weights in fp32, two moments; one more while publishing) and of the model."""
    one = save_bytes(counts.trained_parameters, job)
    rows = {"checkpoint": int(one * (keep + 1)), "export": int(model_bytes * counts.parameters)}
    return {**rows, "swap": int(swap_bytes(counts, job))} if job.nvme else rows
