"""D07: killed at random points of a save, or a file cut by one byte: resuming finds the newest complete one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch

from tercet.errors import InputError
from tercet.parallel.world import World, open_world
from tercet.training.checkpoint import fault_of, find_checkpoint, steps_in
from tests.cases.checkpoints import SmallEngine, checkpoints, state
from tests.tiny import tiny_engine, tiny_strategy

RANKS = 3


def save_for_ever(rank: int, store: str, folder: Path, first: int) -> None:
    """One of three ranks: load the newest checkpoint and save a step after the other until it is killed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    world = open_world(60, store)
    engine = tiny_engine(world, tiny_strategy("zero2", RANKS, RANKS))
    keeper = checkpoints(folder, world)
    if found := find_checkpoint(folder / "checkpoints", world):
        engine.load(found.folder)
    for step in range(first, first + 100_000):
        engine.steps_done = step  # is in every save: the position that a resumed engine takes over
        keeper.save(engine, state(step))


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_three_ranks_killed_while_they_save(tmp_path, kills):
    # Forked from one process that has imported everything: starting three anew costs seconds each time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tercet.parallel.shard"])
    chance, first = random.Random(4), 1
    for number in range(kills):
        store = str(tmp_path / f"store-{number}")
        ranks = [context.Process(target=save_for_ever, args=(r, store, tmp_path, first)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        while not any(step >= first for step, _ in steps_in(tmp_path / "checkpoints")):
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)  # somewhere in a save
        for process in chance.sample(ranks, RANKS):
            process.kill()
        for process in ranks:
            process.join()
        found = find_checkpoint(tmp_path / "checkpoints")
        assert found is not None and found.skipped == []
        assert fault_of(found.folder) is None
        assert found.state["step"] >= first
        first = found.state["step"] + 1
        alone = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, 1))
        alone.load(found.folder)
        assert alone.steps_done == found.state["step"]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest"])
def test_a_damaged_one_is_passed_over_and_named(tmp_path, damage):
    keeper = checkpoints(tmp_path)
    keeper.save(SmallEngine(), state(1))
    keeper.save(SmallEngine(), state(2))
    newest = tmp_path / "checkpoints" / "step-000002"
    victim = newest / ("manifest.json" if damage == "manifest" else "rank-0.safetensors")
    content = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage == "flip":
        content[-1] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    found = find_checkpoint(tmp_path / "checkpoints")
    assert found.state["step"] == 1
    assert len(found.skipped) == 1
    assert str(victim) in found.skipped[0]


def test_none_complete_is_an_error_that_names_the_file(tmp_path):
    checkpoints(tmp_path).save(SmallEngine(), state(1))
    victim = tmp_path / "checkpoints" / "step-000001" / "rank-0.safetensors"
    victim.unlink()
    with pytest.raises(InputError, match=str(victim)):
        find_checkpoint(tmp_path / "checkpoints")


@pytest.mark.parametrize("where", ["../step-000001/{}", "{}/../../step-000001/rank-0.safetensors", "/etc/hostname"])
def test_a_manifest_that_points_elsewhere_vouches_for_nothing(tmp_path, where):
    """Size and hash agree, and yet it is another folder's file that was read."""
    keeper = checkpoints(tmp_path)
    for step in (1, 2):
        keeper.save(SmallEngine(), state(step))
    first, second = (folder for _, folder in reversed(steps_in(tmp_path / "checkpoints")))
    manifest = json.loads((second / "manifest.json").read_bytes())
    name = "rank-0.safetensors"
    manifest["files"][where.format(name)] = manifest["files"].pop(name)
    (second / "manifest.json").write_text(json.dumps(manifest))
    assert "files of another folder" in fault_of(second)
    assert find_checkpoint(tmp_path / "checkpoints").folder == first


def test_none_ever_published_is_no_error(tmp_path):
    assert find_checkpoint(tmp_path / "checkpoints") is None
