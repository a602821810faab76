"""Recomputation of all, of every n-th block, and with the blocks' inputs on the host: the same bits as without, on one to
three ranks, dropout included; memory falls by what the plan says; on a card the copies are ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tercet.parallel.offload import InputsOnHost
from tercet.parallel.recompute import recompute
from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.planner.ledger import host_rows
from tercet.spec.counts import Counts
from tercet.spec.recompute import level_of, levels
from tercet.spec.strategy import Work, why_not
from tests.deepseek_tiny import tiny_deepseek
from tests.ranks import Ranks
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

ROWS, STEPS = 6, 20
AWAY = {"recompute": "full", "offload": {"activations": "cpu"}}
MODEL = tiny_model(layers=5)


def train(world: World, word: str, keys: dict, steps: int = STEPS, model=MODEL):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1, **keys), "fp32", model)
    results = [engine.step(micro_batches(n, world.rank, world.size, 1, ROWS), 1e-2) for n in range(steps)]
    return [(r.loss, r.grad_norm) for r in results], whole_weights(engine), engine.memory()


@pytest.mark.parametrize(
    ("size", "word", "keys"),
    [
        (1, "single", {"recompute": "every-2"}),
        (1, "single", AWAY),
        (2, "ddp", AWAY),
        (3, "zero3", AWAY),
        pytest.param(3, "zero3", {"recompute": "every-3"}, marks=pytest.mark.slow),
        pytest.param(
            3, "zero2", {**AWAY, "offload": {"activations": "cpu", "optimizer": "cpu"}}, marks=pytest.mark.slow
        ),
    ],
)
def test_twenty_steps_are_the_same_bits(pools, size, word, keys):
    steps = STEPS if size == 1 else 4
    away = {"offload": {"optimizer": "cpu"}} if "optimizer" in keys.get("offload", {}) else {}
    plain = pools[size].run(train, word, {"recompute": "none", **away}, steps, limit=200)
    found = pools[size].run(train, word, keys, steps, limit=200)
    for (results, weights, _), (expected, same, _) in zip(found, plain, strict=True):
        assert results == expected
        assert all(torch.equal(weights[name], tensor) for name, tensor in same.items())
    if keys is AWAY:
        job = of_strategy(tiny_strategy(word, size, ROWS, 1, **keys), Work(16, ROWS, "fp32"))
        planned = host_rows(Counts(MODEL), job, True)["pinned"]
        assert planned == size * 5 * 16 * 32 * 4 == sum(memory["peak"]["pinned"] for _, _, memory in found)


def test_a_latent_mixture_with_further_predictions_is_the_same():
    alone = World(0, 1, 0, torch.device("cpu"))
    model = tiny_deepseek()
    plain = train(alone, "single", {"recompute": "none"}, 3, model)
    for keys in ({"recompute": "every-2"}, AWAY):
        results, weights, _ = train(alone, "single", keys, 3, model)
        assert results == plain[0] and all(torch.equal(weights[n], t) for n, t in plain[1].items())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.4), nn.GELU(), nn.Linear(32, 32), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("level", ["selective", "full", "every-2"])
def test_dropout_draws_the_same_numbers_again(level, away):
    def gradients(level: str, away: bool) -> list[torch.Tensor]:
        torch.manual_seed(4)
        blocks = [Dropped() for _ in range(4)]
        inputs = InputsOnHost(torch.device("cpu")) if away else None
        for n, block in enumerate(blocks):
            recompute(block, level_of(level, n), inputs)
        x = torch.randn(2, 8, 32, requires_grad=True)
        y = x
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        return [x.grad, *(p.grad for block in blocks for p in block.parameters())]

    for found, expected in zip(gradients(level, away), gradients("none", False), strict=True):
        assert torch.equal(found, expected)


def test_every_nth_block_is_named():
    assert [level_of("every-3", n) for n in range(5)] == ["full", "none", "none", "full", "none"]
    assert dict(levels("every-2", (0, 1, 2, 5))) == {"full": 2, "none": 2}
    assert levels("selective", (3, 4)) == (("selective", 2),)


def saved_bytes(keys: dict) -> float:
    """Return the bytes that autograd keeps of one forward beyond the parameters, by its own hooks."""
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, 1, 1, **keys), "fp32", MODEL)
    mine = {p.data_ptr() for p in engine.module.parameters()}
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in mine:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    (batch,) = micro_batches(0, 0, 1, 1, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = engine.module(batch.input_ids, batch.positions, batch.documents, batch.labels)
    del loss
    return sum(seen.values())


def test_what_is_kept_falls_as_planned():
    from tercet.planner.ledger import _kind_bytes

    def planned(level: str) -> float:
        job = of_strategy(tiny_strategy("single", 1, 1, 1, recompute=level), Work(16, 1, "fp32"))
        counts = Counts(MODEL)
        return 16 * sum(_kind_bytes(counts, k, job, False) for k in counts.kinds)

    kept = {level: saved_bytes({"recompute": level}) for level in ("none", "every-2", "every-3", "full")}
    for level in ("every-2", "every-3", "full"):
        assert kept["none"] - kept[level] == pytest.approx(planned("none") - planned(level), rel=0.05)


# ------------------------------------------------------------------------------------------------- simulated card


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    pool = Ranks(1)
    yield pool
    pool.stop()


def on_card(world: Any, spoil: bool) -> Any:
    from tercet.data.loader import Batch
    from tercet.rehearsal.device import Simulation
    from tercet.rehearsal.install import cards

    with cards(Simulation()) as simulated:
        if spoil:
            InputsOnHost._bring = _unordered
        found = []
        for keys in ({"recompute": "full"}, AWAY):
            strategy = tiny_strategy("single", 1, ROWS, 2, **keys)
            engine = tiny_engine(World(0, 1, 0, torch.device("card", 0)), strategy, "bf16", MODEL)
            losses = []
            for step in range(3):
                made = micro_batches(step, 0, 1, 2, ROWS)
                batches = [Batch(b.input_ids, b.labels, b.positions, b.documents, b.rows) for b in made]
                before = simulated.device.counts.bytes_to_host
                r = engine.step(batches, 1e-2)
                losses += [r.loss, r.grad_norm]
                moved = simulated.device.counts.bytes_to_host - before
            found.append((losses, moved, simulated.device.counts.unpinned_copies))
        return found


def _unordered(self: InputsOnHost, away: Any) -> None:
    """As _bring, without the event that makes the arithmetic wait."""
    away.value = torch.empty(away.host.shape, dtype=away.host.dtype, device=self._device)
    with self._cards.stream(self._side):
        away.value.copy_(away.host, non_blocking=True)


@pytest.mark.slow
def test_on_a_card_copies_are_ordered_and_change_nothing(process: Ranks):
    ((plain, moved, _), (away, more, _)) = process.run(on_card, False, limit=200)[0]
    assert away == plain
    assert more - moved == 3 * 5 * 2 * 16 * 32 * 2  # micro-batches, blocks, rows, tokens, width, bytes
    # Raised inside backward, on a thread of autograd's: it may take the process with it.
    with pytest.raises(AssertionError, match=r"no event orders|rank 0 ended"):
        process.run(on_card, True, limit=200)


def test_what_it_cannot_move_is_refused():
    def refused(**keys: Any) -> str:
        return "\n".join(why_not(MODEL, tiny_strategy("single", 1, 1, 1, **keys), Work(16, 1)))

    assert "add strategy.recompute=full" in refused(recompute="every-2", offload={"activations": "cpu"})
    assert not refused(offload={"activations": "cpu"})  # recompute is auto, and follows
    assert "selective" in refused(recompute="selective", compile=True) and not refused(recompute="full", compile=True)
