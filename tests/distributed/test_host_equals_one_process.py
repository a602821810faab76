"""Weights in host memory: losses, norms and weights of the plain engine, on any number of ranks, however it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.parallel.jobs import ThreadedJobs
from tercet.parallel.world import World
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

STEPS = 20
MODELS = {
    "dense": lambda: tiny_model(layers=3),
    "tied": lambda: tiny_model(tied=True),
    "deepseek": lambda: tiny_deepseek(layers=3),
}


class AsWithCards(World):
    def jobs(self):
        return ThreadedJobs()


def train(
    world: World,
    word: str,
    model: str,
    rows: int,
    micro: int,
    clip: Any = 0.5,
    steps: tuple[int, int] = (0, STEPS),
    load: str | None = None,
    save: str | None = None,
    threaded: bool = False,
    precision: str = "fp32",
):
    """Return ((loss, norm) per step, weights, an evaluation, generated texts)."""
    world = AsWithCards(**vars(world)) if threaded else world
    strategy = tiny_strategy(word, world.size, rows, micro)
    engine = tiny_engine(world, strategy, precision, MODELS[model](), clip=clip, lr=1e-3)
    if load:
        engine.load(Path(load))
        world.barrier()
    results = []
    for step in range(*steps):
        found = engine.step(micro_batches(step, world.rank, world.size, micro, rows), 1e-3)
        assert found.updated
        results.append((found.loss, found.grad_norm))
    if save:
        engine.save(Path(save)).wait()
        world.barrier()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(99, world.rank, world.size, micro, rows):
        sums += torch.tensor(engine.evaluate(batch), dtype=torch.float64)
    world.sum(sums)
    texts = engine.generate([[1, 2, 3], [4]], 4)
    return results, whole_weights(engine), (sums[0] / sums[1]).item(), texts


def same(got: Any, expected: Any, bound: float = 1e-5) -> None:
    for found, wanted in zip(got[0], expected[0], strict=True):
        assert found == pytest.approx(wanted, rel=bound)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=bound, atol=bound)
    assert got[2] == pytest.approx(expected[2], rel=bound)
    assert got[3] == expected[3]


@pytest.fixture(scope="module")
def alone(pools):
    known: dict[Any, Any] = {}

    def of(model: str, rows: int, clip: Any, **keys: Any) -> Any:
        key = (model, rows, clip, *keys.items())
        if key not in known:
            known[key] = pools[1].run(train, "single", model, rows, rows, clip, *keys.values())[0]
        return known[key]

    return of


FAST = [("deepseek", 3, 2, 0.5), ("tied", 3, 1, "none"), ("dense", 1, 8, 0.5)]
EVERY = [(m, size, n, clip) for m in MODELS for size in (1, 2, 3) for n in (1, 8) for clip in (0.5, "none")]


@pytest.mark.parametrize(
    ("model", "size", "accumulation", "clip"), FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_twenty_steps_equal_the_plain_engine(pools, alone, model, size, accumulation, clip):
    rows = size * accumulation
    for got in pools[size].run(train, "host", model, rows, 1, clip):
        same(got, alone(model, rows, clip))


def test_the_hosts_work_behind_the_cards_changes_no_number(pools, alone):
    """As on a machine with cards: sums and updates in a thread of their own."""
    for got in pools[3].run(train, "host", "deepseek", 6, 1, 0.5, (0, STEPS), None, None, True):
        same(got, alone("deepseek", 6, 0.5))


def test_weights_in_bf16_are_the_masters_rounded(pools):
    """Beside the plain engine's bf16, which adds up in another order: near, and equal on all ranks."""
    expected = pools[1].run(train, "single", "dense", 6, 6, 0.5, (0, 4), None, None, False, "bf16")[0]
    found = pools[3].run(train, "host", "dense", 6, 2, 0.5, (0, 4), None, None, False, "bf16")
    for got in found:
        assert [loss for loss, _ in got[0]] == pytest.approx([loss for loss, _ in expected[0]], rel=2e-3)
        assert got[0] == found[0][0]


@pytest.mark.parametrize("clip", ["none", 0.5])
def test_three_ranks_equal_one_bit_for_bit_where_sums_have_one_order(pools, clip):
    """One micro-batch per rank on three ranks is three micro-batches on one: both add up in the order of rows."""
    ((results, weights, *_),) = pools[1].run(train, "host", "dense", 3, 1, clip, (0, 6))
    for got in pools[3].run(train, "host", "dense", 3, 1, clip, (0, 6)):
        assert [loss for loss, _ in got[0]] == [loss for loss, _ in results]
        if clip == "none":  # the norm is added up over each rank's rows, so its last bits and what it scales may differ
            assert all(torch.equal(got[1][name], tensor) for name, tensor in weights.items())


SLOW = pytest.mark.slow
RESUMED = [
    ("zero2", "host", 3),
    pytest.param("host", "zero2", 3, marks=SLOW),
    pytest.param("host", "host", 2, marks=SLOW),
]


@pytest.mark.parametrize(("first", "then", "size"), RESUMED)
def test_resumed_from_and_into_other_strategies(pools, alone, tmp_path, first, then, size):
    rows = 6
    folder = str(tmp_path)
    expected = alone("deepseek", rows, 0.5)
    half = STEPS // 2
    begun = pools[3].run(train, first, "deepseek", rows, 1, 0.5, (0, half), None, folder)
    ended = pools[size].run(train, then, "deepseek", rows, 1, 0.5, (half, STEPS), folder)
    for before, after in zip(begun, ended, strict=False):
        same((before[0] + after[0], *after[1:]), expected)


def resumed_bits(world: World, folder: str):
    whole = train(world, "host", "dense", 6, 1, 0.5, (0, 6), None, None)
    train(world, "host", "dense", 6, 1, 0.5, (0, 3), None, folder)
    return whole, train(world, "host", "dense", 6, 1, 0.5, (3, 6), folder)


def test_resuming_is_bit_for_bit(pools, tmp_path):
    for whole, rest in pools[3].run(resumed_bits, str(tmp_path)):
        assert whole[0][3:] == rest[0]
        assert all(torch.equal(rest[1][name], tensor) for name, tensor in whole[1].items())


def skip(world: World):
    engine = tiny_engine(world, tiny_strategy("host", world.size, 6, 1), model=tiny_deepseek())
    poisoned = [False]
    engine.module.model.norm.register_forward_hook(lambda m, i, out: out * float("nan") if poisoned[0] else out)
    engine.step(micro_batches(0, world.rank, world.size, 1, 6), 1e-3)
    before = whole_weights(engine)
    states = {p.name: [v.clone() for v in engine.optimizer.state[p.value].values()] for p in engine.layout.parts}
    gates = {name: t.clone() for name, t in engine.balancer.state()}
    poisoned[0] = world.rank == world.size - 1
    found = engine.step(micro_batches(1, world.rank, world.size, 1, 6), 1e-3)
    poisoned[0] = False
    after = whole_weights(engine)
    same_states = all(
        torch.equal(a, b)
        for p in engine.layout.parts
        for a, b in zip(states[p.name], engine.optimizer.state[p.value].values(), strict=True)
    )
    same_gates = all(torch.equal(gates[name], t) for name, t in engine.balancer.state())
    return found.updated, all(torch.equal(before[n], t) for n, t in after.items()), same_states, same_gates


def test_a_skipped_step_changes_nothing(pools):
    assert pools[3].run(skip) == [(False, True, True, True)] * 3
