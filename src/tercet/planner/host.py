"""Weights in host memory: bytes on the card and on the host, and seconds, of strategy host (parallel/host.py).

A card holds two blocks' weights, two blocks' fp32 gradients, each micro-batch's running row, and what one block needs
for one micro-batch. The host holds everything else once, however many cards there are. Formulas: docs/concepts/
host-resident.md.
"""

from __future__ import annotations

from dataclasses import replace

from tercet.planner.constants import Constants
from tercet.planner.job import Job
from tercet.spec.axes.host import Crossing, ends_with_embedding, traffic
from tercet.spec.counts import Counts
from tercet.spec.described import PASSES
from tercet.spec.machine import Machine
from tercet.spec.placement import Rules

ROWS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "buffers")
IN_BETWEEN = 4  # rows of one micro-batch beside the running ones: being written, read, handed on, and their gradient
BOTH_WAYS = 0.5  # of the shorter direction's time that a link adds to the longer one's (an assumption)


def crossing(counts: Counts, job: Job) -> Crossing:
    """Return what crosses one card's link in one optimizer step."""
    return traffic(counts, job.tokens * job.accumulation, job.weight_bytes, job.activation_bytes)


# ------------------------------------------------------------------------------------------------ bytes


def card(counts: Counts, job: Job, layer: float, logits: float, on_gpu: bool) -> dict[str, float]:
    """Return the rows of one rank's processor at the highest moment of a step.

    `layer`: what one block needs for one micro-batch, forward and backward; `logits`: the loss's workspace.
    """
    moments = _moments(counts, job, layer, logits) if on_gpu else [_on_cpu(counts, job, layer, logits)]
    return max(moments, key=lambda rows: sum(rows.values()))


def _moments(counts: Counts, job: Job, layer: float, logits: float) -> list[dict[str, float]]:
    """Return the rows when the loss is made, in each block's backward, and in the embedding's."""
    sizes = counts.host_sizes
    row = job.tokens * counts.model.width * job.activation_bytes
    running = job.accumulation * row + _carried(counts, job)
    early = sizes.begin if ends_with_embedding(counts.model) else 0  # its gradient stays from the end to the last
    weights, gradient, blocks = job.weight_bytes, 4.0, sizes.blocks
    further = len(counts.model.mtp) * (layer + 2 * row)
    found = [
        _rows(
            weights * (sizes.end + early + blocks[-1]),
            gradient * (sizes.end + early),
            running + 3 * row + further,
            logits,
        )
    ]
    for n, size in enumerate(blocks):
        before, after = blocks[n - 1] if n else 0, blocks[n + 1] if n + 1 < len(blocks) else sizes.end
        held = running + IN_BETWEEN * row + layer
        found.append(_rows(weights * (size + before), gradient * (size + after + early), held, 0))
    lookup = weights * sizes.begin  # the embedding's gradient of one micro-batch, in the working format
    found.append(_rows(0, gradient * (sizes.begin + blocks[0]), running + 2 * row, lookup))
    return found


def _carried(counts: Counts, job: Job) -> float:
    """Return what every micro-batch carries from block to block: integers, and the tables of rotations."""
    attention = counts.model.layers[0].attention
    wide = 4 if getattr(attention, "fp32_rotation", False) else job.activation_bytes
    return job.accumulation * job.tokens * (3 * 8 + 2 * attention.rotary_dim * wide)


def _on_cpu(counts: Counts, job: Job, layer: float, logits: float) -> dict[str, float]:
    """Weights and gradients lie in the host's rows; inputs of all blocks stay where they are."""
    row = job.tokens * counts.model.width * job.activation_bytes
    inputs = (len(counts.model.layers) + 1) * job.accumulation * row
    return _rows(0, 0, inputs + _carried(counts, job) + max(layer, len(counts.model.mtp) * layer), logits)


def _rows(weights: float, gradients: float, activations: float, logits: float) -> dict[str, float]:
    found = dict.fromkeys(ROWS, 0.0)
    return {**found, "weights": weights, "gradients": gradients, "activations": activations, "logits": logits}


def host(counts: Counts, job: Job, rules: Rules, on_gpu: bool) -> tuple[float, float]:
    """Return (states, pinned) of the whole machine in bytes.

    states: weights that compute, masters, moments. pinned: summed gradients, what is on its way there (two of the
    largest groups per rank, where several ranks are added up), blocks' inputs.
    """
    sizes = counts.host_sizes
    states = (job.weight_bytes + job.master_bytes) * sizes.whole
    for rank in range(job.ranks):
        placed = counts.placed(replace(rules, part=rank))
        states += sum(size for (row, *_), size in placed.items() if row == "optimizer")
    gradients = 4.0 * (sizes.whole if job.ranks == 1 else counts.parameters)
    staging = 8.0 * sizes.largest * job.ranks if job.ranks > 1 else 0.0
    inputs = crossing(counts, job).inputs * job.ranks if on_gpu else 0.0
    return states, gradients + staging + inputs


# ------------------------------------------------------------------------------------------------ seconds


def seconds(
    counts: Counts, job: Job, step: dict[str, float], link: float | None, updates: float, memory: float
) -> dict[str, float]:
    """Return a step's rows with what computing does not hide: `host` of the links, `optimizer` of the host's update.

    step: computing alone; link: bytes per second and direction of the slowest card's; updates: parameters per second; memory:
    bytes per second of the host's, which all cards' copies and the host's own work share.
    Forward hides its copies and the update but for the embedding's; backward its copies and the host's sums.
    """
    compute = sum(step.values())
    share = _forward_share(job)
    forward, backward = compute * share, compute * (1 - share)
    sizes = counts.host_sizes
    update = sizes.whole / updates
    first = sizes.begin / updates
    late = max(0.0, update - first - forward)
    found = {**step, "optimizer": first + late}
    if link is None:  # a CPU computes with the weights where they lie; ranks share it with the update
        return {**found, "optimizer": update}
    moved = crossing(counts, job)
    twice = job.weight_bytes * sum(sizes.blocks)
    ends = moved.weights - 2 * twice
    in_forward = max(_link(twice + ends, moved.inputs, link), job.ranks * (twice + ends + moved.inputs) / memory)
    sums = (job.ranks + 1) * moved.gradients
    in_backward = max(
        _link(twice + moved.inputs, moved.gradients, link),
        (job.ranks * (twice + moved.inputs + moved.gradients) + sums) / memory,
    )
    bare = job.weight_bytes * sizes.begin / link + 4.0 * sizes.begin / link  # the first fetch, the last gradient
    exposed = max(0.0, in_forward - forward) + max(0.0, in_backward - backward)
    return {**found, "host": exposed + bare, "optimizer": first + max(0.0, late - max(0.0, in_forward - forward))}


def carried(machine: Machine, c: Constants) -> float:
    """Return the bytes per second that the host's memory carries for all cards: no more than machines of rows reached."""
    return min(c.staged_total, machine.known("staged_total", c.staged_total))


def host_rates(machine: Machine, c: Constants, ranks: int) -> tuple[float, float]:
    """Return one of several ranks' share of the host: (bytes per second of its memory, parameters updated per second)."""
    return PASSES * carried(machine, c) / ranks, machine.known("cpu_adam", c.cpu_adam) / ranks


def _link(one: float, other: float, rate: float) -> float:
    return (max(one, other) + BOTH_WAYS * min(one, other)) / rate


def _forward_share(job: Job) -> float:
    """Return forward's share of the arithmetic: once forward, once again, twice backward."""
    return 1 / 4 if job.recompute == "full" else 1 / 3
