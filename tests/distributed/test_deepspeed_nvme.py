"""DeepSpeed with optimizer and weights in files: the losses of one native process, and checkpoints like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.engine.deepspeed import engine as of_deepspeed
from tercet.engine.deepspeed.async_io import ensure_built, is_built, why_not_here
from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.planner.ledger import disk_rows
from tercet.spec.counts import Counts
from tercet.spec.strategy import Work
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

pytestmark = [needs_deepspeed, pytest.mark.slow]
ROWS = 4


@pytest.fixture(scope="module", autouse=True)
def _library():
    if missing := why_not_here():
        pytest.skip("; ".join(missing))
    if not is_built():
        ensure_built(print, lambda done, total, phase: None)


def model():
    """Large enough for DeepSpeed to put parts into files (below 1 MB it keeps them in memory); embedding and head have
    sizes that three ranks share unevenly, so that nothing begins at a round number of bytes.
    """
    return tiny_model(width=512, ffn=1024, vocabulary=4099)


def steps(world: World, engine, first: int, last: int):
    results = [engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 1e-3) for s in range(first, last)]
    return [(r.loss, r.grad_norm) for r in results]


def open_it(world: World, name: str, precision: str, swap: Path):
    return engine_of(world, layout(name, world.size, ROWS), ROWS, precision, model(), swap)


def in_files(world: World, name: str, precision: str, swap: Path, folder: Path):
    engine = open_it(world, name, precision, swap)
    losses = steps(world, engine, 0, 3)
    files = engine.save(folder).wait()
    world.barrier()
    sizes = {str(p.relative_to(swap)): p.stat().st_size for p in swap.rglob("*.swp")}
    held = [f.numel() for f in engine.fragments.flats]
    total, count = engine.evaluate(micro_batches(9, world.rank, world.size, 1, ROWS)[0])
    text = engine.generate([[1, 2, 3]], 4)
    losses += steps(world, engine, 3, 5)
    return losses, whole_weights(engine), sizes, held, sorted(files), (total, count), text, engine.memory()


def alone(world: World, precision: str):
    engine = tiny_engine(world, tiny_strategy("single", 1, ROWS, 1), precision, model())
    losses = [engine.step(micro_batches(s, 0, 1, 1, ROWS), 1e-3) for s in range(3)]
    text = engine.generate([[1, 2, 3]], 4)
    losses += [engine.step(micro_batches(s, 0, 1, 1, ROWS), 1e-3) for s in range(3, 5)]
    return [(r.loss, r.grad_norm) for r in losses], whole_weights(engine), text


def resume(world: World, name: str, precision: str, swap: Path, folder: Path):
    engine = open_it(world, name, precision, swap)
    engine.load(folder)
    return steps(world, engine, 3, 5), whole_weights(engine)


def poisoned(world: World, swap: Path):
    engine = open_it(world, "zero3-nvme", "bf16", swap)
    steps(world, engine, 0, 2)
    before, loss = whole_weights(engine), of_deepspeed.loss_of
    of_deepspeed.loss_of = lambda *a: loss(*a) * float("nan")
    bad = engine.step(micro_batches(2, world.rank, world.size, 1, ROWS), 1e-3)
    of_deepspeed.loss_of = loss
    after = whole_weights(engine)
    return bad.updated, before, after, steps(world, engine, 3, 4)


def test_a_bad_step_changes_nothing_in_the_files(pools, tmp_path):
    for updated, before, after, (good,) in pools[2].run(poisoned, tmp_path / "swap", limit=200):
        assert not updated
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        assert all(torch.isfinite(torch.tensor(good)))


CASES = [
    (3, "zero3-nvme-both", "bf16"),
    (3, "zero3-nvme", "fp32"),
    (2, "zero3-nvme-both", "fp32"),
    (2, "zero3-nvme-weights", "fp32"),
    (1, "zero3-nvme-both", "bf16"),
]


@pytest.mark.parametrize(("size", "name", "precision"), CASES)
def test_files_change_nothing(pools, tmp_path, size, name, precision):
    """Losses, norms, weights and texts are one native process's; a resumed run repeats the rest bit for bit."""
    saved = tmp_path / "saved"
    saved.mkdir()
    found = pools[size].run(in_files, name, precision, tmp_path / "swap", saved, limit=200)
    expected, weights, text = pools[1].run(alone, precision)[0]
    fp32 = precision == "fp32"
    for losses, got, sizes, held, _, _, got_text, memory in found:
        for (loss, norm), (loss_there, norm_there) in zip(losses, expected, strict=True):
            assert loss == pytest.approx(loss_there, rel=1e-5 if fp32 else 3e-3)
            assert norm == pytest.approx(norm_there, rel=1e-4 if fp32 else 3e-2)
        if fp32:
            assert got_text == text
            for key, tensor in weights.items():
                torch.testing.assert_close(got[key], tensor, rtol=1e-3, atol=1e-5)
        of_optimizer = [s for name, s in sizes.items() if "/optimizer/" in name]
        of_weights = [s for name, s in sizes.items() if "params/" in name]
        assert bool(of_optimizer) == ("weights" not in name) and bool(of_weights) == (name != "zero3-nvme")
        if of_optimizer:
            assert held.count(0) >= 2, "masters stayed in memory"
        assert memory["between_steps"]["pinned"] > 0
    again = pools[size].run(resume, name, precision, tmp_path / "other", saved, limit=200)
    for (losses, got), before in zip(again, found, strict=True):
        assert losses == before[0][3:]
        for key, tensor in before[1].items():
            assert torch.equal(got[key], tensor), key


def native_resumes(world: World, folder: Path):
    engine = tiny_engine(world, tiny_strategy("single", 1, ROWS, 1), "fp32", model())
    words = engine.load(folder)
    losses = [engine.step(micro_batches(s, 0, 1, 1, ROWS), 1e-3) for s in range(3, 5)]
    return words, [(r.loss, r.grad_norm) for r in losses]


def test_another_engine_and_another_number_of_ranks_resume_with_moments(pools, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    losses, _, sizes, _, files, *_ = pools[2].run(
        in_files, "zero3-nvme-both", "fp32", tmp_path / "swap", saved, limit=200
    )[0]
    assert len(files) > 1, "each group in files is a file of its own, so that no rank holds all of its state"
    words, native = pools[1].run(native_resumes, saved)[0]
    assert "deepspeed" in words[-1]
    for got, expected in zip(native, losses[3:], strict=True):
        assert got == pytest.approx(expected, rel=1e-4)
    for got, _ in pools[3].run(resume, "zero3-nvme", "fp32", tmp_path / "other", saved, limit=200):
        for one, expected in zip(got, losses[3:], strict=True):
            assert one == pytest.approx(expected, rel=1e-4)
    # The plan's row of the disk is an upper bound: gradients below 1 MB (here many) have no file.
    strategy = layout("zero3-nvme-both", 2, ROWS)
    job = of_strategy(strategy, Work(16, ROWS, "fp32"))
    planned = disk_rows(Counts(model()), job, 2, 4)["swap"]
    assert 0.8 * planned < sum(sizes.values()) <= planned
