"""D04: keep the last k and the best; at no moment, not even between write and removal, is one of them missing."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from tercet.training.checkpoint import best_checkpoint, fault_of, steps_in
from tests.cases.checkpoints import SmallEngine, checkpoints, state

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2, 6: 2.4}  # best at step 2


@pytest.mark.parametrize("keep", [1, 2])
def test_at_each_moment(tmp_path, monkeypatch, keep):
    published: list[int] = []

    def check(*_: object) -> None:
        there = {step for step, folder in steps_in(tmp_path / "checkpoints") if fault_of(folder) is None}
        if published:
            assert max(there) >= published[-1], "the last complete one is gone"
            assert min(there | set(published), key=LOSSES.__getitem__) in there, "the best one is gone"

    rename, rmtree = pathlib.Path.rename, shutil.rmtree
    monkeypatch.setattr(pathlib.Path, "rename", lambda self, target: (check(), rename(self, target), check())[1])
    monkeypatch.setattr(shutil, "rmtree", lambda path, **kw: (check(), rmtree(path, **kw), check()))
    keeper = checkpoints(tmp_path, keep=keep)
    for step, loss in LOSSES.items():
        keeper.save(SmallEngine(), state(step, loss))
        published.append(step)
        check()
    left = {step for step, _ in steps_in(tmp_path / "checkpoints")}
    assert left == {2, *range(7 - keep, 7)}
    assert best_checkpoint(tmp_path / "checkpoints").name == "step-000002"


def test_a_kill_between_write_and_removal_leaves_more_not_less(tmp_path, monkeypatch):
    keeper = checkpoints(tmp_path, keep=1)
    keeper.save(SmallEngine(), state(1, 1.0))
    monkeypatch.setattr(keeper, "_prune", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        keeper.save(SmallEngine(), state(2, 2.0))
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [2, 1]


@pytest.mark.parametrize("lost", [float("nan"), float("-inf"), None])
def test_what_is_no_loss_is_never_the_best(tmp_path, lost):
    keeper = checkpoints(tmp_path, keep=1)
    for step, loss in ((1, lost), (2, 1.5), (3, lost), (4, 2.0)):
        keeper.save(SmallEngine(), state(step, loss))
        assert max(steps_in(tmp_path / "checkpoints"))[0] == step
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [4, 2]
    assert best_checkpoint(tmp_path / "checkpoints").name == "step-000002"
