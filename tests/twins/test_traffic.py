"""Collectives of one step, counted at the process group, equal what plans price: in kind, number and bytes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.parallel.world import World
from tercet.planner.clock import collectives
from tercet.planner.job import of_strategy
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.strategy import Work
from tests.deepseek_tiny import tiny_deepseek
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


MODELS = {"dense": tiny_model, "experts and a further prediction": tiny_deepseek}


def count(world: World, word: str, precision: str, rows: int, keys: dict, model: str):
    strategy = tiny_strategy(word, world.size, rows, 1, **keys)
    engine = tiny_engine(world, strategy, precision, MODELS[model]())
    engine.step(micro_batches(0, world.rank, world.size, 1, rows), 1e-3)
    batches = micro_batches(1, world.rank, world.size, 1, rows)
    with Traffic() as seen:
        engine.step(batches, 1e-3)
    return {kind: (seen.number[kind], seen.bytes[kind]) for kind in seen.number}


def compare(pools, size: int, word: str, precision: str, accumulation: int, model: str = "dense"):
    counts, rows = Counts(MODELS[model]()), size * accumulation
    for keys in [{}] + ([{"reduce_gradients": "once_per_step"}] if word in ("zero2", "zero3") else []):
        job = of_strategy(tiny_strategy(word, size, rows, 1, **keys), Work(16, rows, precision))
        expected: dict[str, tuple[int, float]] = {}
        for c in collectives(counts, job):
            number, payload = expected.get(c.kind, (0, 0))
            expected[c.kind] = (number + c.count, payload + c.payload)
        for got in pools[size].run(count, word, precision, rows, keys, model):
            assert got == expected, keys


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", STRATEGIES)
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 3)])
def test_kind_number_and_bytes(pools, size, word, precision, accumulation):
    compare(pools, size, word, precision, accumulation)


@pytest.mark.parametrize("word", ["ddp", "zero3"])
def test_experts_and_further_predictions_travel_too(pools, word):
    compare(pools, 3, word, "bf16", 2, "experts and a further prediction")


def test_gradients_of_a_large_model_go_in_buckets_that_cut_no_tensor():
    """7 B in fp32: a bucket is closed by the tensor that fills it, so most hold one matrix."""
    counts = Counts(preset("deepseek-llm-7b"))
    (one,) = collectives(counts, of_strategy(tiny_strategy("ddp", 3, 96, 1), Work(2048, 96)))
    sizes, number, filled = [t.parameters for t in reversed(preset("deepseek-llm-7b").tensors())], 0, 0
    for n, size in enumerate(sizes):
        filled += 4 * size
        if filled >= 25e6 or n == len(sizes) - 1:
            number, filled = number + 1, 0
    assert one.count == number < len(sizes)
    assert one.payload == 4 * sum(sizes)
