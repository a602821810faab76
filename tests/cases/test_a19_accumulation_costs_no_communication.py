"""A19: one reduction per optimizer step for ddp and zero1; for sharded gradients a documented switch."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.parallel.world import World
from tests.tiny import micro_batches, tiny_engine, tiny_strategy


class Count(TorchDispatchMode):
    """Counts collectives and the bytes of their inputs at the process group's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name() if hasattr(func, "name") else str(func)
        if name.startswith(("c10d::", "_c10d_functional::")):
            flat = torch.utils._pytree.tree_leaves(args)
            large = max((a.numel() for a in flat if isinstance(a, torch.Tensor)), default=0)
            if large > 8:  # the step's own sums of a few numbers are not meant
                self.calls[name.split("::")[1].split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def count(world: World, word: str, rows: int, keys: dict):
    engine = tiny_engine(world, tiny_strategy(word, world.size, rows, 1, **keys))
    engine.step(micro_batches(0, world.rank, world.size, 1, rows), 1e-2)
    batches = micro_batches(1, world.rank, world.size, 1, rows)
    with Count() as counted:
        engine.step(batches, 1e-2)
    assert dist.is_initialized()
    memory = engine.memory()
    return (
        dict(counted.calls),
        memory["peak"]["gradients"],
        sum(t.numel() * 4 for t in engine.layout.module.parameters()),
    )


def reductions(calls: dict[str, int]) -> int:
    return sum(n for name, n in calls.items() if "reduce" in name)


@pytest.mark.parametrize("word", ["ddp", "zero1"])
def test_reductions_do_not_grow_with_accumulation(pools, word):
    once, _, _ = pools[2].run(count, word, 2, {})[0]
    four, _, _ = pools[2].run(count, word, 8, {})[0]
    assert reductions(once) > 0
    assert four == once


@pytest.mark.parametrize("word", ["zero2", "zero3"])
def test_the_switch_trades_communication_for_memory(pools, word):
    each, memory_each, _ = pools[2].run(count, word, 8, {})[0]
    once, memory_once, _ = pools[2].run(count, word, 8, {"reduce_gradients": "once_per_step"})[0]
    assert reductions(each) == 4 * reductions(once)
    assert memory_once >= 1.9 * memory_each
