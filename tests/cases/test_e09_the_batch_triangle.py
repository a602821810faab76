"""E09: micro-batch, accumulation and ranks give the batch; what does not divide is said, with the nearest that do."""

from __future__ import annotations

import pytest

from tercet.planner.answer import plan
from tercet.planner.launcher_files.read import read_deepspeed


@pytest.mark.parametrize(("ranks", "below", "above"), [(3, 252, 258), (7, 252, 266)])
def test_a_batch_of_256_in_twos(ranks, below, above):
    answer = plan(
        "llama-3.2-1b",
        ["strategy=zero3", "strategy.micro_batch=2"],
        gpus=f"{ranks}x4090",
        batch="256",
        sequence="512",
    )
    best = answer["strategies"][0]
    assert best["micro_batch"] == 2
    assert best["accumulation"] * 2 * ranks - best["idle_rows"] == 256  # the effective batch is what was asked for
    assert answer["work"]["tokens_per_step"] == 256 * 512
    assert any(f"{below} or {above}" in n for n in answer["notes"])


def test_nothing_is_idle_when_it_divides():
    answer = plan(
        "llama-3.2-1b",
        ["strategy=zero3", "strategy.micro_batch=2"],
        gpus="3x4090",
        batch="252",
        sequence="512",
    )
    assert answer["strategies"][0]["idle_rows"] == 0
    assert not any("empty" in n for n in answer["notes"])


def test_two_of_three_numbers_give_the_third():
    two = read_deepspeed({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, "x", 4)
    assert (two.micro_batch, two.accumulation) == (2, 32)
    odd = read_deepspeed({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, "x", 3)
    assert any(kind == "contradiction" and "252 or 258" in says for _, kind, says in odd.findings)


def test_more_micro_batch_than_rows_is_refused_with_the_largest_that_works():
    answer = plan("llama-3.2-1b", ["strategy.micro_batch=100"], gpus="3x4090", batch="96", sequence="512")
    assert not answer["strategies"]
    assert any("largest micro-batch is 32" in w for r in answer["refused"] for w in r["why"])
