"""Files on NVMe: a folder of the run's own, refused when there is no room, gone when the run has ended."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import pytest

from tercet.errors import InputError
from tercet.spec.recipe import build_recipe
from tercet.spec.run_folder import RunFolder
from tercet.training import swap as module
from tercet.training.swap import Swap, swap_folder

NVME = {"engine": "deepspeed", "offload": {"optimizer": "nvme"}}


def run_in(folder, strategy: dict, nvme_path: str | None = None, needed: int = 0) -> RunFolder:
    folder.mkdir()
    run = RunFolder(folder)
    section = {**strategy, "offload": {**strategy["offload"], "nvme_path": nvme_path}}
    run.recipe.write_text(build_recipe({"data": {"train": "x"}, "strategy": section}).to_yaml())
    planned = {"engine": "deepspeed", "zero": 3, "offload_optimizer": strategy["offload"]["optimizer"]}
    run.plan.write_text(json.dumps({"strategy": planned, "disk": {"swap": needed}}))
    return run


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    monkeypatch.setattr(module, "ensure_built", lambda say, progress: None)


def test_two_runs_share_a_drive_and_not_a_folder(tmp_path):
    drive = str(tmp_path / "drive")
    recipe = build_recipe({"data": {"train": "x"}, "strategy": {"offload": {"optimizer": "nvme", "nvme_path": drive}}})
    one, other = (swap_folder(recipe, RunFolder(tmp_path / name / "run")) for name in ("a", "b"))
    assert one != other and one.parent == other.parent == tmp_path / "drive"
    assert swap_folder(build_recipe({"data": {"train": "x"}}), RunFolder(tmp_path / "run")) == tmp_path / "run" / "swap"


def test_what_a_killed_start_left_is_removed_and_so_is_the_runs_own(tmp_path):
    run = run_in(tmp_path / "run", NVME)
    swap = Swap(run)
    left = run.path / "swap" / "zero_stage_3" / "rank0.swp"
    left.parent.mkdir(parents=True)
    left.write_text("old")
    swap.prepare(print)
    assert (run.path / "swap").is_dir() and not left.exists()
    swap.remove()
    assert not (run.path / "swap").exists()


def test_too_little_room_is_refused_with_both_figures(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(100, 90, 10 * 10**9))
    with pytest.raises(InputError, match=r"9\.3 GiB free, 102 GiB are needed"):
        Swap(run_in(tmp_path / "run", NVME, needed=110 * 10**9)).prepare(print)


def test_a_run_that_keeps_nothing_in_files_touches_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ensure_built", lambda *_: pytest.fail("built for nothing"))
    swap = Swap(run_in(tmp_path / "run", {"engine": "deepspeed", "offload": {"optimizer": "cpu"}}))
    swap.prepare(print)
    swap.remove()
    assert not (tmp_path / "run" / "swap").exists()
    assert shutil is module.shutil
