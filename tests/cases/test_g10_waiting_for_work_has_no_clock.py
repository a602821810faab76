"""G10, G48: one rank that works longer than the collectives' clock allows costs nothing; one that dies is noticed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tercet.parallel.world import World
from tests.ranks import Ranks

SLOW = """
    import time
    import {module} as m
    plain, seen = {owner}.{name}, []
    def slow(*args, **kwargs):
        if not seen and RANK == {rank}:
            seen.append(1)
            time.sleep(9)
        return plain(*args, **kwargs)
    {owner}.{name} = slow
"""
CLOCK = "train.collective_timeout_seconds=5"
WORK = {
    "a save's tensors": ("tercet.engine.shards", "m", "write_file", 1),
    "a save's hash": ("tercet.engine.shards", "m", "file_hash", 1),
    "publishing": ("tercet.training.checkpoint", "m.Checkpoints", "_publish", 0),
    "pruning": ("tercet.training.checkpoint", "m.Checkpoints", "_prune", 0),
    "loading the weights": ("tercet.engine.native", "m", "initial_tensor", 1),
    "the trained model": ("tercet.weights.writing", "m", "save_file", 0),
    "the summary": ("tercet.training.finish", "m", "_summary", 0),
    "the record": ("tercet.training.record", "m.Recorder", "__init__", 0),
}
SHORT = ("train.steps=2", "output.checkpoint_every=1", "train.evaluate_every=0", "data.validation=none")


@pytest.mark.parametrize(
    "work",
    [w if w == "a save's tensors" else pytest.param(w, marks=pytest.mark.slow) for w in WORK],
)
def test_a_run_with_one_slow_rank(cli, work):
    module, owner, name, rank = WORK[work]
    cli.inject(SLOW.format(module=module, owner=owner, name=name, rank=rank))
    strategy = "strategy=ddp" if work == "loading the weights" else "strategy=zero3"
    cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", strategy, CLOCK, *SHORT, "output.keep=1")
    assert [e["step"] for e in cli.events("run", "checkpoint")] == [1, 2]
    assert (cli.folder / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_whose_hashes_are_slow(cli, rank):
    cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", *SHORT)
    cli.inject(SLOW.format(module="tercet.training.checkpoint", owner="m", name="file_hash", rank=rank))
    done = cli.run("train", "--resume", "run", CLOCK, "train.steps=4")
    assert "resumed from" in done.stderr
    assert [e["step"] for e in cli.events("run", "step")] == [1, 2, 3, 4]


def dies_at_work(world: World, folder: str) -> None:
    if world.rank == 0:
        world.barrier()
        os._exit(9)  # as SIGKILL would: while the other one waits for its work
    world.barrier()
    begin = time.monotonic()
    try:
        world.meet()
    except RuntimeError:
        (Path(folder) / "noticed").write_text(str(time.monotonic() - begin))
        raise


def test_the_death_of_the_one_that_works_is_noticed(tmp_path):
    pool = Ranks(2)
    pool._start()  # not run(): it would end the other rank as soon as one has ended
    try:
        for pipe in pool._pipes:
            pipe.send((dies_at_work, (str(tmp_path),)))
        deadline = time.monotonic() + 60
        while not (tmp_path / "noticed").exists():
            assert time.monotonic() < deadline, "the waiting rank never learnt it"
            time.sleep(0.01)
    finally:
        pool.stop()


def shares(world: World, folder: str) -> list[str]:
    from tercet.training import checkpoint

    read, plain = [], checkpoint.file_hash
    checkpoint.file_hash = lambda path: (read.append(path.name), plain(path))[1]
    try:
        assert checkpoint.find_checkpoint(Path(folder) / "checkpoints", world) is not None
    finally:
        checkpoint.file_hash = plain
    return read


def test_ranks_share_the_hashing(pools, tmp_path):
    from tests.cases.test_d06_one_rank_renames import save_many

    pools[3].run(save_many, str(tmp_path), False)
    read = pools[3].run(shares, str(tmp_path))
    assert sorted(name for part in read for name in part) == [
        "rank-0.safetensors",
        "rank-1.safetensors",
        "rank-2.safetensors",
        "state.json",
    ]
    assert all(read), "each rank reads a part"
