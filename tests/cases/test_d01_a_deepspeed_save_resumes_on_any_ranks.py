"""D01 and exact resume for DeepSpeed: any stage resumes on any number of ranks, and in the native engine, with moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.engine.shards import Reader
from tercet.parallel.world import World
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_model, whole_weights

pytestmark = needs_deepspeed
slow = pytest.mark.slow
ROWS = 6


def steps(world: World, engine, first: int, last: int) -> list[float]:
    return [engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 1e-2).loss for s in range(first, last)]


def open_tiny(world: World, name: str, precision: str):
    return engine_of(world, layout(name, world.size, ROWS), ROWS, precision, tiny_model(tied=name == "zero2"))


def save(world: World, name: str, precision: str, folder: Path):
    engine = open_tiny(world, name, precision)
    steps(world, engine, 0, 3)
    handle = engine.save(folder)
    files = handle.wait()
    world.barrier()
    return list(files), steps(world, engine, 3, 5), whole_weights(engine)


def resume(world: World, name: str, precision: str, folder: Path, tied_like: str):
    tied = tied_like == "zero2"
    engine = engine_of(world, layout(name, world.size, ROWS), ROWS, precision, tiny_model(tied=tied))
    restored = engine.load(folder)
    return restored, steps(world, engine, 3, 5), whole_weights(engine)


def moments(folder: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    value = torch.empty(shape)
    Reader(folder).read_into(f"exp_avg_sq/{name}", 0, value)
    return value


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zero3", "bf16"),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                ("zero0", "fp32"),
                ("zero1", "bf16"),
                ("zero2-cpu", "bf16"),
                ("zero2", "fp32"),
                ("zero3-weights", "fp32"),
            ]
        ),
    ],
)
def test_resume_equals_no_interruption_bit_for_bit(pools, tmp_path, name, precision):
    saved = pools[3].run(save, name, precision, tmp_path)
    files, losses, weights = saved[0]
    assert files == ["rank-0.safetensors"]
    assert not list(tmp_path.glob("*.pt")), "a pickle was written"
    restored, got, got_weights = pools[3].run(resume, name, precision, tmp_path, name)[0]
    assert restored == ["weights", "exp_avg", "exp_avg_sq", "position"]
    assert got == losses
    for key, tensor in weights.items():
        assert torch.equal(got_weights[key], tensor), key


@pytest.mark.parametrize(
    ("saved_as", "saved_on", "name", "size"),
    [
        ("zero3", 3, "zero3", 2),
        ("zero2", 3, "native-zero3", 2),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                ("zero0", 3, "zero3", 2),
                ("zero3", 2, "zero0", 3),
                ("zero1", 2, "zero2-cpu", 3),
                ("zero3-cpu", 3, "zero1", 1),
                ("native-zero3", 3, "zero3", 2),
                ("native-zero2", 2, "zero1", 3),
            ]
        ),
    ],
)
def test_other_ranks_other_stage_other_engine(pools, tmp_path, saved_as, saved_on, name, size):
    """Weights and moments come back by name; the next losses are those of the uninterrupted run."""
    _, losses, weights = pools[saved_on].run(save, saved_as, "fp32", tmp_path)[0]
    found = pools[size].run(resume, name, "fp32", tmp_path, saved_as)
    for restored, got, got_weights in found:
        crossed = saved_as.startswith("native") != name.startswith("native")
        assert ("written by the" in restored[-1]) == crossed
        assert got == pytest.approx(losses, rel=1e-6)
        for key, tensor in weights.items():
            torch.testing.assert_close(got_weights[key], tensor, rtol=1e-4, atol=2e-6)


def test_moments_are_whole_and_named(pools, tmp_path):
    """The file of three DeepSpeed ranks holds, put together, the second moments that native saves."""
    ours, theirs = tmp_path / "native", tmp_path / "deepspeed"
    ours.mkdir(), theirs.mkdir()
    pools[2].run(save, "native-zero3", "fp32", ours)
    pools[3].run(save, "zero3", "fp32", theirs)
    for t in tiny_model().tensors():
        expected = moments(ours, t.name, t.shape)
        torch.testing.assert_close(moments(theirs, t.name, t.shape), expected, rtol=1e-4, atol=1e-9)
        assert expected.abs().sum() > 0 or t.kind == "embedding"
