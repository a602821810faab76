"""The simulated card: the engine's steps equal the CPU's, mistakes of order and place are caught, memory has an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.ranks import RankError, Ranks

# What runs on the card runs in a process of its own: PyTorch must know the device before its first backward.


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    pool = Ranks(1)
    yield pool
    pool.stop()


def on_cards(world: Any, function: Any, *args: Any) -> Any:
    from tercet.rehearsal.install import cards

    with cards(function.simulation()) as simulated:
        return function(simulated, *args)


def values() -> Any:
    from tercet.rehearsal.device import Simulation

    return Simulation()


def shapes() -> Any:
    from tercet.rehearsal.device import Simulation

    return Simulation(shapes=True, capacity_bytes=2**30)


def uses(simulation: Any) -> Any:
    def mark(function: Any) -> Any:
        function.simulation = simulation
        return function

    return mark


# ---------------------------------------------------------------------------------------- the engine's own steps


@uses(values)
def losses(simulated: Any, latent: bool, precision: str, recompute: str) -> tuple[list[float], list[float]]:
    import torch
    from tests.deepseek_tiny import tiny_deepseek
    from tests.tiny import micro_batches, tiny_model, tiny_strategy

    from tercet.data.loader import Batch
    from tercet.engine import EngineSetup, open_engine
    from tercet.parallel.world import World
    from tercet.spec.recipe import OptimSection

    model = tiny_deepseek() if latent else tiny_model()
    strategy = tiny_strategy("single", 1, 4, 2, recompute=recompute)

    def run(device: torch.device) -> list[float]:
        world = World(0, 1, 0, device)
        engine = open_engine(EngineSetup(model, strategy, OptimSection(lr=1e-3), precision, world, seed=3))
        found = []
        for step in range(3):
            made = micro_batches(step, 0, 1, 2, 4)
            batches = [Batch(b.input_ids, b.labels, b.positions, b.documents, b.rows) for b in made]
            result = engine.step(batches, 1e-3)
            found += [result.loss, result.grad_norm]
        return found

    return run(torch.device("card", 0)), run(torch.device("cpu"))


@pytest.mark.parametrize(
    ("latent", "precision", "recompute"),
    [(False, "fp32", "none"), (False, "bf16", "selective"), (True, "fp32", "full"), (True, "bf16", "none")],
)
def test_steps_equal_the_cpus(process: Ranks, latent: bool, precision: str, recompute: str):
    ((there, here),) = process.run(on_cards, losses, latent, precision, recompute)
    assert there == pytest.approx(here, rel=1e-5 if precision == "fp32" else 5e-3)


# ------------------------------------------------------------------------------------------------------ mistakes


@uses(values)
def without_an_event(simulated: Any, with_event: bool) -> float:
    import torch

    side = torch.card.Stream()
    x = torch.ones(4, device="card")
    side.wait_stream(torch.card.current_stream())
    with torch.card.stream(side):
        y = x * 3
    if with_event:
        torch.card.current_stream().wait_stream(side)
    return float((y + 1).sum())


def test_a_tensor_used_before_its_stream_is_waited_for_is_named(process: Ranks):
    assert process.run(on_cards, without_an_event, True) == [16.0]
    with pytest.raises(RankError, match=r"aten::add.*still being written by aten::mul.*no event orders"):
        process.run(on_cards, without_an_event, False)


@uses(values)
def freed_too_early(simulated: Any, recorded: bool) -> None:
    import torch

    side = torch.card.Stream()
    x = torch.ones(4, device="card")
    side.wait_stream(torch.card.current_stream())
    with torch.card.stream(side):
        kept = x * 3
    if recorded:
        x.record_stream(side)
    del x
    torch.ones(4, device="card")  # the same memory
    del kept


def test_memory_given_back_under_another_streams_hands_is_named(process: Ranks):
    process.run(on_cards, freed_too_early, True)
    with pytest.raises(RankError, match="given back while aten::mul"):
        process.run(on_cards, freed_too_early, False)


@uses(values)
def read_at_once(simulated: Any) -> tuple[list[float], list[float]]:
    import torch

    x = torch.arange(3.0).to("card") * 2
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    early = host.tolist()
    torch.card.synchronize()
    return early, host.tolist()


def test_a_copy_that_nobody_waited_for_is_not_there_yet(process: Ranks):
    ((early, late),) = process.run(on_cards, read_at_once)
    assert all(x != x for x in early) and late == [0.0, 2.0, 4.0]  # NaN until the host has waited


@uses(values)
def overwritten_too_early(simulated: Any) -> tuple[list[float], int]:
    import torch

    host = torch.ones(3).pin_memory()
    x = host.to("card", non_blocking=True)
    host.fill_(7)
    unpinned = torch.ones(3).to("card", non_blocking=True)
    del unpinned
    return (x + 0).tolist(), simulated.device.counts.unpinned_copies


def test_a_pinned_buffer_changed_before_its_copy_gives_the_change(process: Ranks):
    assert process.run(on_cards, overwritten_too_early) == [([7.0, 7.0, 7.0], 1)]


@uses(values)
def two_places(simulated: Any) -> Any:
    import torch

    return torch.ones(3, device="card") + torch.ones(3)


def test_tensors_of_two_devices_are_refused(process: Ranks):
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        process.run(on_cards, two_places)


# -------------------------------------------------------------------------------------------------------- memory


@uses(shapes)
def too_large(simulated: Any) -> tuple[str, int, int]:
    import torch

    held = torch.empty(100 << 18, device="card")  # 100 MiB
    try:
        torch.empty(300 << 20, device="card")
    except torch.OutOfMemoryError as error:
        return str(error), simulated.device.allocator.allocated, held.nbytes
    return "", 0, 0


def test_a_card_has_an_end(process: Ranks):
    ((message, allocated, nbytes),) = process.run(on_cards, too_large)
    assert "asked for 1.2 GiB" in message and "100 MiB" in message
    assert allocated == nbytes


@uses(values)
def rehearsal_of(simulated: Any, word: str) -> dict[str, Any]:
    from tercet.planner.answer import choose
    from tercet.rehearsal.run import rehearse
    from tercet.spec.machine import machine_of
    from tercet.spec.recipe import build_recipe

    tree = {
        "model": {
            "layers": "3",
            "width": "256",
            "heads": "4",
            "ffn": "640",
            "vocabulary": "2048",
            "context_tokens": "512",
        },
        "data": {"train": "-", "sequence_tokens": "512"},
        "train": {"batch_sequences": "12"},
        "strategy": word,
    }
    recipe, machine = build_recipe(tree, ["strategy.micro_batch=2"]), machine_of("3x4090", "128GB")
    strategy, plan = choose(recipe, machine, 1 if word == "single" else 3)
    return {**rehearse(recipe, strategy, machine)[0], "ledger": plan["ledger"]}


@pytest.mark.parametrize("word", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_every_native_strategy_is_rehearsed_and_lies_near_the_plan(process: Ranks, word: str):
    (found,) = process.run(on_cards, rehearsal_of, word)
    planned = sum(size for row, size in found["ledger"].items() if row not in ("reserve", "buffers"))
    assert found["fits"] and found["peak_bytes"] == pytest.approx(planned, rel=0.25)
    calls = found["step"]["collectives"]
    assert bool(calls) == (word != "single")
    if word == "zero3":
        assert calls["_allgather_base_"] > calls["_reduce_scatter_base_"]


def test_blocks_are_rounded_kept_and_joined_as_documented():
    from tercet.rehearsal.allocator import MIB, Allocator, OutOfCapacity

    allocator = Allocator(100 * MIB)
    small = allocator.allocate(1, 0)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    middle = allocator.allocate(3 * MIB, 0)
    assert allocator.reserved == 22 * MIB  # a 20 MiB segment, cut
    alone = allocator.allocate(11 * MIB, 0)
    assert allocator.reserved == 22 * MIB  # from what is left of it
    large = allocator.allocate(31 * MIB, 0)
    assert allocator.reserved == 54 * MIB  # rounded up to 2 MiB
    for block in (middle, alone, large, small):
        allocator.release(block)
    assert allocator.allocated == 0 and allocator.reserved == 54 * MIB
    allocator.allocate(90 * MIB, 0)  # only when what is kept has gone back
    assert allocator.reserved == 90 * MIB
    with pytest.raises(OutOfCapacity):
        allocator.allocate(30 * MIB, 0)
    assert allocator.peak_reserved == 90 * MIB
