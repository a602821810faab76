"""All the reasons why a strategy cannot run here: the trainer's own (why_not), uneven cuts, missing number formats."""

from __future__ import annotations

from tercet.spec.axes import context, expert, pipeline, tensor
from tercet.spec.machine import Machine
from tercet.spec.model import Model
from tercet.spec.strategy import Strategy, Work, why_not

# What matmuls exist per compute capability, and from which on they are fast (NVIDIA's tensor-core tables).
FP8_CAPABILITY = 8.9
BF16_CAPABILITY = 8.0


def refusals(model: Model, strategy: Strategy, work: Work, machine: Machine) -> list[str]:
    """Return one sentence per reason; empty when the strategy may run on the machine."""
    why = why_not(model, strategy, work, machine)
    why += tensor.legal(model, strategy.tensor)
    why += pipeline.legal(model, strategy.pipeline)
    why += expert.legal(model, strategy.expert, strategy.mesh.data_ranks)
    why += context.legal(work.sequence_tokens, strategy.context)
    product = strategy.tensor * strategy.pipeline * strategy.context
    if strategy.ranks % product:
        why.append(
            f"tensor {strategy.tensor} times pipeline {strategy.pipeline} times context {strategy.context} is "
            f"{product}, which does not divide the {strategy.ranks} ranks"
        )
    return why + formats(work, machine)


def formats(work: Work, machine: Machine) -> list[str]:
    """Return the sentence for a number format that the card's tensor cores lack (E23)."""
    card = machine.card
    if work.fp16_accumulation and (card is None or card.flops.get("fp16_fast", 0) <= card.plain_flops):
        what = f"{card.name}'s matmuls are no faster" if card else "a CPU's matmuls are never added up"
        return [f"train.fp16_accumulation: {what} in fp16; leave it out"]
    if work.precision == "fp8":
        if card is None:
            return ["train.precision: fp8 has no fast matmul on a CPU (only an emulation for tests); use bf16 or fp32"]
        if "fp8" not in card.flops:
            return [
                f"train.precision: fp8 needs compute capability {FP8_CAPABILITY}; {card.name} has "
                f"{card.compute_capability} and no fp8 tensor cores; use bf16"
            ]
    if (
        work.precision in ("bf16", "bf16-pure")
        and card is not None
        and (card.compute_capability or 9) < BF16_CAPABILITY
    ):
        return [
            f"train.precision: {work.precision} needs compute capability {BF16_CAPABILITY}; {card.name} has "
            f"{card.compute_capability}; use fp16"
        ]
    return []


def fp8_gain(machine: Machine) -> float | None:
    """Return how much faster the card's fp8 matmuls are than bf16's by its data sheet, or None without fp8."""
    card = machine.card
    if card is None or "fp8" not in card.flops:
        return None
    return card.flops["fp8"] / card.plain_flops
