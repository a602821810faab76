"""G02, G03, G48, G49: a save that fails or is slow at any point, on any rank, hangs no rank and loses nothing.

Real ranks write real files; the fault is brought in at the call that would meet it on a disk.
"""

from __future__ import annotations

import errno
import os
import pathlib
import time
from pathlib import Path

import pytest
import torch

from tercet.engine import shards
from tercet.errors import RunError
from tercet.parallel.world import World
from tercet.training import checkpoint, disk
from tercet.training.checkpoint import fault_of, steps_in
from tests.cases.checkpoints import Said, SmallEngine, checkpoints, state

CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}
# Where a rank works for a save, and the function that does it. Rank 0 alone does what is marked.
POINTS = {
    "mkdir": (pathlib.Path, "mkdir", True),
    "tensors": (shards, "write_file", False),
    "hash": (shards, "file_hash", False),
    "state": (checkpoint, "write_synced", True),
    "folder": (disk, "sync_folder", True),
    "rename": (pathlib.Path, "rename", True),
    "prune": (checkpoint.shutil, "rmtree", True),
}


class Fault:
    """Makes one call fail: at once, or after a delay in which the other ranks have long arrived; or only slow."""

    def __init__(self, point: str, how: str, code: str | None, times: int, needs: str):
        self.owner, self.name, _ = POINTS[point]
        self.how, self.code, self.left, self.needs = how, code, times, needs
        self.real = getattr(self.owner, self.name)

    def __enter__(self):
        def broken(*args, **kwargs):
            if self.left and self.needs in str(args[0]):
                self.left -= 1
                if self.how in ("late", "slow"):
                    time.sleep(0.05)
                if self.code is not None:
                    raise OSError(CODES[self.code], os.strerror(CODES[self.code]), str(args[0]))
            return self.real(*args, **kwargs)

        setattr(self.owner, self.name, broken)
        return self

    def __exit__(self, *error):
        setattr(self.owner, self.name, self.real)


def one_run(world: World, folder: str, background: bool, fault: tuple | None, policy: str):
    """Save at steps 1, 2, 3 as the loop does, each step with a collective; `fault`: (rank, Fault's arguments)."""
    disk.POLL_SECONDS = 0.01
    said = Said() if world.rank == 0 else None
    engine = SmallEngine(world.rank, background=background)
    engine.value = engine.value.clone()
    keeper = checkpoints(
        Path(folder), world, keep=1, disk_full=policy, say=said.warn if said else lambda text: None, record=said
    )
    mine = fault is not None and fault[0] == world.rank
    message = None
    try:
        for step in (1, 2, 3):
            engine.value.fill_(step)
            if mine and step == 2:
                with Fault(*fault[1:]) as brought:
                    keeper.save(engine, state(step))
                    engine.value.fill_(-1)  # what the next step does
                    if not background:
                        engine.value.fill_(step)
                    flags = world.sum(torch.tensor([int(keeper.writing())])).item()
                    while flags:  # the loop's agreement, step by step
                        flags = world.sum(torch.tensor([int(keeper.writing())])).item()
                    keeper.finish()
                    assert brought.left == 0, "the fault was never met"
            else:
                keeper.save(engine, state(step))
                if background:
                    engine.value.fill_(-1)
                flags = world.sum(torch.tensor([int(keeper.writing())])).item()
                while flags:
                    flags = world.sum(torch.tensor([int(keeper.writing())])).item()
                keeper.finish()
    except RunError as error:
        message = str(error)
    world.barrier()  # all ranks are at the same place, whatever happened
    return message, keeper.last_step, said.lines if said else [], said.events if said else []


def faulty(world: World, folder: str, background: bool, faults: list[tuple], policy: str):
    results = []
    for number, fault in enumerate(faults):
        place = Path(folder) / str(number)
        if world.rank == 0:
            place.mkdir()
        world.barrier()
        results.append(one_run(world, str(place), background, fault, policy))
    return results


def matrix(ranks: int, codes: tuple[str | None, ...]) -> list[tuple]:
    """Every (rank, point, how, code) that can be: what rank 0 does alone fails on rank 0."""
    found = []
    for point, (_, _, alone) in POINTS.items():
        for rank in (0,) if alone else range(ranks):
            for code in codes:
                for how in ("slow",) if code is None else ("once", "late"):
                    needs = "step-000001" if point == "prune" else ".step-000002" if point != "folder" else "check"
                    found.append((rank, point, how, code, 1, needs))
    return found


def holds(folder: Path, step: int) -> None:
    """The newest checkpoint is whole and of one step, and nothing half-written is left."""
    steps = steps_in(folder / "checkpoints")
    assert steps[0][0] == step
    for number, found in steps:
        assert fault_of(found) is None
        for file in found.glob("rank-*.safetensors"):
            assert torch.equal(shards.Reader(found).keys() and load(file), torch.full((8, 8), float(number)))
    assert not list((folder / "checkpoints").glob(".*"))


def load(file: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(file)["weights/w"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_full_disk_is_waited_for_and_a_slow_one_too(pools, tmp_path, size, background):
    faults = matrix(size, ("ENOSPC", None))
    results = pools[size].run(faulty, str(tmp_path), background, faults, "wait")
    for number, fault in enumerate(faults):
        outcome = [rank[number] for rank in results]
        assert [(m, last) for m, last, *_ in outcome] == [(None, 3)] * size, fault
        holds(tmp_path / str(number), 3)
        lines, events = outcome[0][2:]
        assert events == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)], fault
        if fault[3] is not None and fault[1] != "prune":
            assert any("disk full" in line and f"rank {fault[0]}" in line for line in lines), fault


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_other_fault_ends_all_ranks_with_one_sentence(pools, tmp_path, size, background):
    faults = [f for f in matrix(size, ("EIO", "EACCES")) if f[1] != "prune"]
    results = pools[size].run(faulty, str(tmp_path), background, faults, "wait")
    for number, fault in enumerate(faults):
        messages = {rank[number][0] for rank in results}
        assert len(messages) == 1, fault
        message = messages.pop()
        assert message, fault
        assert f"the checkpoint of step 2 could not be written: rank {fault[0]}" in message
        assert os.strerror(CODES[fault[3]]) in message
        assert "--resume" in message
        holds(tmp_path / str(number), 2 if steps_in(tmp_path / str(number) / "checkpoints")[0][0] == 2 else 1)


@pytest.mark.parametrize("background", [False, True])
def test_the_stop_policy_ends_all_ranks(pools, tmp_path, background):
    faults = [f for f in matrix(2, ("ENOSPC",)) if f[1] != "prune"]
    results = pools[2].run(faulty, str(tmp_path), background, faults, "stop")
    for number, fault in enumerate(faults):
        assert all("disk full: the checkpoint of step 2" in rank[number][0] for rank in results), fault
