"""What every engine answers to, and what a layout keeps between evaluation batches."""

from __future__ import annotations

import inspect
import sys
from collections import Counter

import pytest
import torch
from tests.tiny import micro_batches, tiny_engine, tiny_strategy
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.engine import Engine
from tercet.engine.deepspeed.engine import DeepSpeedEngine
from tercet.engine.native import NativeEngine
from tercet.engine.seeds import seed_random_numbers
from tercet.parallel.data import Replicated
from tercet.parallel.layout import Layout
from tercet.parallel.shard import Sharded


def verbs(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize(
    ("protocol", "kinds"), [(Engine, (NativeEngine, DeepSpeedEngine)), (Layout, (Replicated, Sharded))]
)
def test_every_verb_takes_what_the_protocol_says(protocol, kinds):
    for kind in kinds:
        for verb in verbs(protocol):
            wanted, found = (list(inspect.signature(getattr(k, verb)).parameters) for k in (protocol, kind))
            assert found == wanted, f"{kind.__name__}.{verb}"
        assert hasattr(kind, "config") or protocol is not Engine


def test_random_numbers_of_a_step_follow_all_that_tells_steps_apart():
    """Ranks or micro-batches with one mask of dropout would train the same part of the model."""
    drawn = {}
    for key in ((7, 3, 0, 1), (8, 3, 0, 1), (7, 4, 0, 1), (7, 3, 1, 1), (7, 3, 0, 2), (7, 3, 1, 0), (7, 30, 1, 0)):
        seed_random_numbers(*key)
        drawn[key] = torch.rand(8)
    assert len({tuple(numbers.tolist()) for numbers in drawn.values()}) == len(drawn)
    seed_random_numbers(7, 3, 0, 1)
    assert torch.equal(torch.rand(8), drawn[7, 3, 0, 1])


class Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func.name():
            self.number["gathers"] += 1
        return func(*args, **(kwargs or {}))


def evaluate_and_generate(world, word: str, room: bool):
    from tercet.parallel import shard

    if not room:
        free, shard.free_bytes = shard.free_bytes, lambda device, ranks: 0
    engine = tiny_engine(world, tiny_strategy(word, world.size, 6))
    before = engine.step(micro_batches(0, world.rank, world.size, 1, 6), 1e-2)
    held = engine.memory()["between_steps"]
    losses, numbers = [], []
    for batch in micro_batches(1, world.rank, world.size, 1, 6):
        with Gathers() as seen:
            losses.append(engine.evaluate(batch)[0])
        numbers.append(seen.number["gathers"])
    with Gathers() as seen:
        texts = engine.generate([[1, 2]], 4)
    numbers.append(seen.number["gathers"])
    after = engine.memory()["between_steps"]
    engine.step(micro_batches(1, world.rank, world.size, 1, 6), 1e-2)
    again = engine.evaluate(micro_batches(1, world.rank, world.size, 1, 6)[0])[0]
    if not room:
        shard.free_bytes = free
    return before.loss, losses, texts, numbers, held == after, again


@pytest.mark.parametrize("word", ["zero1", "zero3"])
def test_an_evaluation_pass_gathers_once_and_gives_back(pools, word):
    """Weights stay gathered between evaluation batches and sampled tokens, are given back after, and are not stale."""
    alone = pools[3].run(evaluate_and_generate, "ddp", True)
    found = pools[3].run(evaluate_and_generate, word, True)
    for (_, losses, texts, numbers, given_back, again), expected in zip(found, alone, strict=True):
        assert numbers[0] > 0 and numbers[1:] == [0] * (len(numbers) - 1)
        assert given_back
        assert losses == pytest.approx(expected[1], rel=1e-5) and texts == expected[2]
        assert again == pytest.approx(expected[5], rel=1e-5)


def test_without_room_sharded_weights_are_gathered_anew(pools):
    for _, _, _, numbers, given_back, _ in pools[3].run(evaluate_and_generate, "zero3", False):
        assert all(n > 0 for n in numbers) and given_back


def measured_without_private_names(world):
    hidden = "torch.distributed.fsdp._fully_shard._fsdp_param"
    module = sys.modules[hidden]
    sys.modules[hidden] = None  # type: ignore[assignment]
    try:
        engine = tiny_engine(world, tiny_strategy("zero3", world.size, 3))
        loss = engine.step(micro_batches(0, world.rank, world.size, 1, 3), 1e-2).loss
        return loss, engine.memory()
    finally:
        sys.modules[hidden] = module


def test_where_fsdps_private_names_are_others_memory_is_unknown_and_training_is_not(pools):
    for loss, memory in pools[3].run(measured_without_private_names):
        assert loss > 0
        for moment in memory.values():
            assert "weights" not in moment and "gradients" not in moment and moment["optimizer"] > 0
