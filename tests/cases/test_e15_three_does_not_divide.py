"""E15: tensor or expert splits by three are judged in the planner, with the sizes that work and the alternatives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tercet.planner.answer import plan
from tercet.planner.legal import refusals
from tercet.spec.axes import expert, pipeline
from tercet.spec.axes.split import balanced, chunk
from tercet.spec.families import describe
from tercet.spec.machine import machine_of
from tercet.spec.recipe import ModelSection
from tercet.spec.strategy import Strategy, Work
from tests.tiny import tiny_model

DENSE = tiny_model(vocabulary=65, ffn=48)  # 4 heads, 2 key-value heads


def why(model, **axes) -> list[str]:
    return refusals(model, Strategy(ranks=3, **axes), Work(16, 6), machine_of("3x4090"))


def test_tensor_by_three_says_what_does_not_divide_and_what_would():
    (sentence,) = why(DENSE, tensor=3)
    for word in (
        "4 heads",
        "2 key-value heads",
        "65 vocabulary",
        "sizes that divide all of them: 1",
        "zero 1 to 3",
    ):
        assert word in sentence
    assert "48 feed-forward" not in sentence  # that one does divide


def test_sizes_named_as_valid_are_valid():
    model = describe(ModelSection(preset="llama-2-7b"))  # 32 heads, 11008, 32000
    (sentence,) = why(model, tensor=3)
    sizes = sentence.split("divide all of them: ")[1].split(";")[0].replace(" or ", ", ").split(", ")
    assert "2" in sizes
    for size in map(int, sizes):
        assert not refusals(model, Strategy(ranks=size, tensor=size), Work(16, 64), machine_of(f"{size}x4090"))


def test_experts_and_layers_split_unevenly():
    model = describe(ModelSection(preset="deepseek-v2-lite"))  # 64 experts, 27 layers
    assert not expert.legal(model, 3, 3)
    assert expert.split(model, 3) == (22, 21, 21)
    assert pipeline.split(DENSE, 2) == (1, 1)
    assert sum(pipeline.split(describe(ModelSection(preset="llama-2-7b")), 3)) == 32
    assert chunk(64, 3) == (22, 22, 20) and chunk(4, 3) == (2, 2, 0) and balanced(64, 3) == (22, 21, 21)
    for n in range(1, 40):
        for ranks in range(1, 9):
            assert sum(chunk(n, ranks)) == sum(balanced(n, ranks)) == n


def test_impossible_counts_have_sentences():
    assert "at most 2" in why(DENSE, pipeline=3)[0]
    assert "no experts" in why(DENSE, expert=3)[0]
    moe = describe(ModelSection(preset="deepseek-v2-lite"))
    assert "divisor of 3" in why(moe, expert=2)[0]
    assert any("does not divide the 3 ranks" in w for w in why(DENSE, pipeline=2))
    assert (
        "exceed the sequence" in refusals(DENSE, Strategy(ranks=32, context=32), Work(16, 64), machine_of("32x4090"))[0]
    )


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "context"])
def test_the_plan_carries_the_sentence(axis):
    answer = plan("llama-2-7b", [f"strategy.{axis}=3"], gpus="3x4090")
    assert not answer["strategies"]
    assert any(f"strategy.{axis}" in w for w in answer["refused"][0]["why"])


def test_zero_takes_any_number_of_ranks():
    for ranks in (3, 5, 7):
        for zero in range(4):
            s = replace(Strategy(ranks=ranks, zero=zero), reduce_gradients="once_per_step")
            assert not refusals(DENSE, s, Work(16, 210), machine_of(f"{ranks}x4090"))
