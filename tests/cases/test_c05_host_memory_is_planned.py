"""C05: what an offloaded run needs of the host is said beforehand, pinned buffers and loading included."""

from __future__ import annotations

import pytest

from tercet.parallel.world import World
from tercet.planner.answer import plan
from tercet.planner.job import of_strategy
from tercet.planner.ledger import host_rows
from tercet.spec.counts import Counts
from tercet.spec.strategy import Work
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy


def held_by_a_rank(world: World, word: str, what: str):
    """Run two steps with the optimizer, or the weights too, on the host; return what lies there and what was planned."""
    model, rows = tiny_model(width=64, ffn=160, vocabulary=900), 2 * world.size
    strategy = tiny_strategy(word, world.size, rows, 1, offload={what: "cpu"})
    engine = tiny_engine(world, strategy, "bf16", model)
    for step in range(2):
        engine.step(micro_batches(step, world.rank, world.size, 1, rows, vocabulary=900), 1e-3)
    job = of_strategy(strategy, Work(16, rows))
    return engine.memory()["peak"], host_rows(Counts(model), job, machine_is_cpu=False)


@pytest.mark.parametrize(("word", "what"), [("ddp", "optimizer"), ("zero2", "optimizer"), ("zero3", "weights")])
def test_a_real_offloaded_run_holds_on_the_host_what_was_planned(pools, word, what):
    found = pools[3].run(held_by_a_rank, word, what)
    planned = found[0][1]
    states = sum(measured["states"] for measured, _ in found)
    pinned = sum(measured["pinned"] for measured, _ in found)
    assert states == pytest.approx(planned["states"], rel=0.02)
    assert pinned <= planned["pinned"], "page-locked blocks are rounded up on a machine with cards"
    assert pinned >= 0.3 * planned["pinned"]
    # The process itself and its batches are not nothing, nor is the tensor on its way from a file.
    assert planned["inputs"] > 3 * 300e6 and planned["loading"] >= 3 * 4 * 900 * 64


def test_a_host_that_is_too_small_is_refused_with_numbers():
    keys = ["strategy=ddp", "train.precision=fp32"]
    answer = plan("llama-3.2-1b", keys, ranks=3, host_ram="20GB", sequence="512", batch="12")
    assert not answer["strategies"]
    (why,) = {w.split(";")[0] for r in answer["refused"] for w in r["why"] if r["strategy"]["recompute"] == "full"}
    assert "of host RAM, 18.6 GiB are there" in why and why.endswith("short")
    assert plan("llama-3.2-1b", keys, ranks=3, host_ram="200GB", sequence="512", batch="12")["strategies"]
