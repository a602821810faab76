"""D06: 50 saves by three ranks that write at random paces, all on one shared folder: every one is published whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tercet.parallel.world import World
from tercet.training.checkpoint import fault_of, steps_in
from tests.cases.checkpoints import SmallEngine, checkpoints, state


def save_many(world: World, folder: str, as_nodes: bool) -> int:
    if as_nodes:  # three machines that share the folder: every rank is local rank 0
        world = replace(world, local_rank=0)
    keeper = checkpoints(Path(folder), world)
    for step in range(1, 26):
        keeper.save(SmallEngine(world.rank, delays=True), state(step))
    return keeper.last_step


def test_fifty_saves(pools, tmp_path):
    for as_nodes in (False, True):
        folder = tmp_path / str(as_nodes)
        folder.mkdir()
        assert pools[3].run(save_many, str(folder), as_nodes) == [25, 25, 25]
        left = steps_in(folder / "checkpoints")
        assert [step for step, _ in left] == [25, 24]
        assert [fault_of(path) for _, path in left] == [None, None]
        assert len(list(left[0][1].glob("rank-*.safetensors"))) == 3
        assert not list((folder / "checkpoints").glob(".*"))
