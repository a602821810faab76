"""E23: a number format that the card lacks is refused in the plan, by compute capability; never a late crash."""

from __future__ import annotations

import pytest

from tercet.planner.answer import plan
from tercet.planner.legal import formats, fp8_gain
from tercet.spec.machine import machine_of
from tercet.spec.strategy import Work

FP8 = Work(2048, 96, "fp8")


@pytest.mark.parametrize(
    ("card", "capability", "legal"), [("3090", 8.6, False), ("4090", 8.9, True), ("H100 SXM", 9.0, True)]
)
def test_by_capability(card, capability, legal):
    machine = machine_of(f"1x{card}")
    assert machine.card.compute_capability == capability
    why = formats(FP8, machine)
    assert (why == []) == legal
    if not legal:
        assert "8.9" in why[0] and "8.6" in why[0] and machine.card.name in why[0]
    assert (fp8_gain(machine) is not None) == legal


def test_on_a_cpu():
    assert "CPU" in formats(FP8, machine_of(ranks=1))[0]


def test_the_plan_refuses_and_says_what_to_use():
    answer = plan("llama-3.2-1b", ["train.precision=fp8"], gpus="1x3090")
    assert not answer["strategies"]
    assert any("fp8 tensor cores; use bf16" in w for w in answer["refused"][0]["why"])
