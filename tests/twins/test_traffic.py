"""Collectives of one step, counted at the process group, equal the description in kind, number and bytes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.parallel.world import World
from tercet.spec.axes import data, shard
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_model, tiny_strategy

KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
SMALL = 8  # the step's own sums of a few numbers (token count, loss, norm) are not payload


class Traffic(TorchDispatchMode):
    """Records (kind -> number, bytes): the whole payload, gathered or before it is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func.name().partition("::")
        if space == "c10d":
            tensors = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
            largest = max(tensors, key=lambda t: t.numel())
            if largest.numel() > SMALL:
                kind = KINDS.get(name.partition(".")[0], name)
                self.number[kind] += 1
                self.bytes[kind] += largest.numel() * largest.element_size()
        return func(*args, **(kwargs or {}))


def count(world: World, word: str, precision: str, rows: int, keys: dict):
    engine = tiny_engine(world, tiny_strategy(word, world.size, rows, 1, **keys), precision)
    engine.step(micro_batches(0, world.rank, world.size, 1, rows), 1e-3)
    batches = micro_batches(1, world.rank, world.size, 1, rows)
    with Traffic() as seen:
        engine.step(batches, 1e-3)
    return {kind: (seen.number[kind], seen.bytes[kind]) for kind in seen.number}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", STRATEGIES)
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 3)])
def test_kind_number_and_bytes(pools, size, word, precision, accumulation):
    model = tiny_model()
    for keys in [{}] + ([{"reduce_gradients": "once_per_step"}] if word in ("zero2", "zero3") else []):
        strategy = tiny_strategy(word, size, size * accumulation, 1, **keys)
        if strategy.zero == 0:
            planned = data.traffic(model)
        else:
            planned = shard.traffic(
                model,
                size,
                strategy.zero,
                accumulation,
                strategy.reduce_gradients == "every_micro_batch",
                2 if precision == "bf16" else 4,
            )
        expected = {c.kind: (c.count, c.payload) for c in planned}
        for got in pools[size].run(count, word, precision, size * accumulation, keys):
            assert got == expected, keys
