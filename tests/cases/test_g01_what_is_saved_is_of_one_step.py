"""G01: a save that is written behind the next steps holds the step it names, wherever its tensors lie."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tercet.engine import shards
from tercet.engine.native import NativeEngine
from tercet.parallel.world import World
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

ROWS, STEPS = 6, 3


def saved_behind_steps(world: World, engine, folder: str):
    """Save in the background with a writer that waits until further steps are done; return both contents."""
    module = __import__(type(engine).__module__, fromlist=["on_cards"])
    write, decide, go = shards.write_file, module.on_cards, threading.Event()

    def late(*args):
        go.wait()
        write(*args)

    def step(number: int) -> None:
        engine.step(micro_batches(number, world.rank, world.size, 1, ROWS), 1e-2)

    step(0)
    now, behind = Path(folder) / f"now-{world.rank}", Path(folder) / f"behind-{world.rank}"
    now.mkdir()
    behind.mkdir()
    assert not engine.save(now).background, "state in host memory is written at once, without a copy"
    shards.write_file, module.on_cards = late, lambda tensors: True
    try:
        handle = engine.save(behind)
        for number in range(1, STEPS):
            step(number)
        assert not handle.done()
        go.set()
        handle.wait()
    finally:
        shards.write_file, module.on_cards = write, decide
    after = Path(folder) / f"after-{world.rank}"
    after.mkdir()
    engine.save(after).wait()
    return [{p.name: load_file(p) for p in sorted(f.iterdir())} for f in (now, behind, after)]


def native(world: World, word: str, offload: str, folder: str):
    strategy = tiny_strategy(word, world.size, ROWS, offload={"optimizer": offload})
    return saved_behind_steps(world, tiny_engine(world, strategy, "bf16"), folder)


def deepspeed(world: World, name: str, folder: str):
    return saved_behind_steps(world, engine_of(world, layout(name, world.size, ROWS), ROWS, "bf16"), folder)


def check(results) -> None:
    for now, behind, after in results:
        assert behind.keys() == now.keys()
        tensors = {name: t for file in now.values() for name, t in file.items()}
        late = {name: t for file in behind.values() for name, t in file.items()}
        moved = {name: t for file in after.values() for name, t in file.items()}
        assert tensors.keys() == late.keys()
        for name, tensor in tensors.items():
            assert torch.equal(late[name], tensor), f"{name} is of another step"
        changed = [name for name in tensors if not torch.equal(moved[name], tensors[name])]
        assert len(changed) > len(tensors) / 2, "the steps in between must have changed what was saved"


@pytest.mark.parametrize(("size", "word"), [(1, "ddp"), (2, "zero1"), (2, "zero3")])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_native(pools, tmp_path, size, word, offload):
    check(pools[size].run(native, word, offload, str(tmp_path)))


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero3", pytest.param("zero2-cpu", marks=pytest.mark.slow)])
def test_deepspeed(pools, tmp_path, name):
    check(pools[2].run(deepspeed, name, str(tmp_path)))


def test_a_card_is_no_reason_when_the_state_lies_on_the_host(tmp_path):
    """The world's device may be a card while the optimizer's state is in host memory."""
    engine: NativeEngine = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, ROWS))
    object.__setattr__(engine.world, "device", torch.device("meta"))
    assert not engine.save(tmp_path).background
