"""Moments in eight bits and bf16 without masters, on one to three ranks: near fp32, alike on any number of ranks,
saved and restored bit for bit, and as many bytes as the plan says.
"""

from __future__ import annotations

import pytest
import torch

from tercet.errors import InputError
from tercet.parallel.world import World
from tercet.planner.ledger import ledger_for
from tercet.spec.strategy import Work, why_not
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

ROWS, STEPS = 6, 20
MODEL = tiny_model(width=64, ffn=300)  # rows long enough for blocks, one of two ragged ones
EIGHT = {"name": "adamw-8bit"}


def engine_of(world: World, word: str, precision: str, optim: dict, keys: dict):
    return tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1, **keys), precision, MODEL, **optim)


def batches(world: World, step: int):
    return micro_batches(step % 4, world.rank, world.size, 1, ROWS)


def train(world: World, word: str, precision: str, optim: dict, keys: dict, steps: int = STEPS):
    engine = engine_of(world, word, precision, optim, keys)
    losses = [engine.step(batches(world, n), 3e-3).loss for n in range(steps)]
    work = Work(16, ROWS, precision, optim.get("name", "adamw"))
    return losses, engine.memory(), ledger_for(MODEL, engine.strategy, work, world.rank)


@pytest.fixture(scope="module")
def plain(pools):
    return pools[1].run(train, "single", "fp32", {}, {})[0][0]


CASES = [
    (1, "single", "fp32", EIGHT, {}),
    pytest.param(1, "single", "bf16-pure", EIGHT, {}, marks=pytest.mark.slow),
    pytest.param(2, "ddp", "bf16-pure", {}, {}, marks=pytest.mark.slow),
    (3, "ddp", "fp32", EIGHT, {"offload": {"optimizer": "cpu"}}),
    (3, "zero1", "bf16-pure", EIGHT, {}),
    pytest.param(3, "zero2", "bf16", EIGHT, {}, marks=pytest.mark.slow),
    (3, "zero3", "bf16-pure", EIGHT, {}),
    (3, "zero3", "bf16-pure", {}, {"reduce_gradients": "once_per_step", "recompute": "full"}),
]


@pytest.mark.parametrize(("size", "word", "precision", "optim", "keys"), CASES)
def test_near_fp32_and_as_many_bytes_as_planned(pools, plain, size, word, precision, optim, keys):
    for losses, measured, planned in pools[size].run(train, word, precision, optim, keys):
        assert losses == pytest.approx(plain, rel=1e-2)
        for moment in ("between_steps", "peak"):
            rows = ("weights", "master", "gradients", "optimizer")
            got = {row: measured[moment].get(row, 0) for row in rows}
            assert got == {row: planned[moment][row] for row in rows}, moment
    assert plain[-1] < 0.9 * plain[0]


def test_what_the_formats_save():
    def held(precision: str, optimizer: str) -> float:
        rows = ledger_for(MODEL, tiny_strategy("single", 1, 1), Work(16, 1, precision, optimizer))["between_steps"]
        return sum(rows[row] for row in ("weights", "master", "optimizer")) / MODEL.parameters

    assert held("bf16", "adamw") == pytest.approx(14, abs=0.1)
    assert held("bf16", "adamw-8bit") == pytest.approx(8, abs=0.3)
    assert held("bf16-pure", "adamw-8bit") == pytest.approx(4, abs=0.3)


def resumed(world: World, precision: str, folder, saved_by: str | None, word: str, optim: dict, back: bool):
    """Train three steps and save as `saved_by`, or resume that save and return (weights, three more losses)."""
    engine = engine_of(world, word, precision, optim, {})
    if saved_by is None:
        for n in range(3):
            engine.step(batches(world, n), 3e-3)
        engine.save(folder).wait()
        world.meet()
    else:
        engine.load(folder)
        world.meet()
    state = {
        key: value.clone()
        for part in engine.layout.parts[:2]
        for key, value in engine.optimizer.state[part.value].items()
    }
    weights = whole_weights(engine)
    losses = [engine.step(batches(world, 3 + n), 3e-3).loss for n in range(3)] if back else []
    return weights, losses, state


@pytest.mark.parametrize(
    ("before", "after"), [((3, "zero3"), (2, "zero2")), ((3, "zero2"), (1, "single")), ((2, "ddp"), (3, "zero1"))]
)
def test_a_save_goes_on_at_any_number_of_ranks(pools, tmp_path, before, after):
    (size, word), (other, other_word) = before, after
    first = pools[size].run(resumed, "bf16-pure", tmp_path, None, word, EIGHT, True)[0]
    same = pools[size].run(resumed, "bf16-pure", tmp_path, word, word, EIGHT, True)[0]
    assert same[1] == first[1] and all(torch.equal(same[2][k], v) for k, v in first[2].items())
    there = pools[other].run(resumed, "bf16-pure", tmp_path, word, other_word, EIGHT, True)[0]
    assert all(torch.equal(tensor, there[0][name]) for name, tensor in first[0].items())
    assert there[1] == pytest.approx(first[1], rel=2e-3)
    # To fp32 moments and masters and back to eight bits: what the codes stand for.
    wide = pools[1].run(resumed, "bf16", tmp_path, word, "single", {}, True)[0]
    assert wide[1] == pytest.approx(first[1], rel=3e-3)


def test_moments_in_fp32_are_taken_into_eight_bits(pools, tmp_path):
    first = pools[2].run(resumed, "fp32", tmp_path, None, "zero2", {}, True)[0]
    there = pools[3].run(resumed, "fp32", tmp_path, "zero2", "zero3", EIGHT, True)[0]
    assert all(torch.equal(tensor, there[0][name]) for name, tensor in first[0].items())
    assert there[1] == pytest.approx(first[1], rel=1e-3)


def accumulated(world: World, word: str, count: int):
    engine = engine_of(world, word, "bf16-pure", {}, {})
    batch = micro_batches(0, 0, 1, 1, ROWS)[-1]  # the row that trains all of its tokens
    norms = []
    for n in (1, count):
        engine = engine_of(world, word, "bf16-pure", {"clip": "none"}, {})
        norms.append(engine.step([batch] * n, 0.0).grad_norm)
    return norms


@pytest.mark.parametrize(("size", "word"), [(1, "single"), (3, "zero3")])
def test_many_micro_batches_are_added_up_in_fp32(pools, size, word):
    """A10: 64 equal gradients give the mean of one, whatever the weights' format."""
    for one, many in pools[size].run(accumulated, word, 64):
        assert many == pytest.approx(one, rel=1e-2)


def test_what_does_not_go_together_is_refused():
    def refused(word: str, precision: str, optimizer: str, **keys) -> str:
        return "\n".join(why_not(MODEL, tiny_strategy(word, 2, 2, 1, **keys), Work(16, 2, precision, optimizer)))

    assert "bf16-pure has no master copies" in refused("zero2", "bf16-pure", "adamw", offload={"optimizer": "cpu"})
    assert "native engine's" in refused("deepspeed-zero2", "bf16-pure", "adamw")
    assert "adamw-8bit" in refused("deepspeed-zero2", "bf16", "adamw-8bit")
    assert not refused("zero2", "bf16", "adamw-8bit") and not refused("zero3", "bf16-pure", "adamw-8bit")


def test_an_engine_that_cannot_read_codes_says_so(pools, tmp_path):
    pools[1].run(resumed, "fp32", tmp_path, None, "single", EIGHT, False)
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, ROWS), model=MODEL)
    engine.reads_blocks = False
    with pytest.raises(InputError, match="eight bits"):
        engine.load(tmp_path)
