"""G40: every file of a run and of prepared data has the rights that the user's umask gives; a report goes elsewhere."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.cases.unprivileged import open_folder, run_unprivileged
from tests.cli import Cli


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """A run of two ranks with checkpoints and a model, made by a user whose group may write (umask 002)."""
    cli = Cli(tmp_path_factory.mktemp("g40"), tmp_path_factory.mktemp("cache"))
    before = os.umask(0o002)
    try:
        cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=4")
    finally:
        os.umask(before)
    return cli


def test_weights_checkpoints_logs_and_shards_alike(shared_run):
    cli = shared_run
    found = [*(cli.folder / "run").rglob("*"), *Path(cli.environment["XDG_CACHE_HOME"]).rglob("*")]
    names = {p.name for p in found}
    assert {"model.safetensors", "rank-1.safetensors", "rank-0.log", "events.jsonl", "manifest.json"} <= names
    wrong = {
        str(p): oct(stat.S_IMODE(p.stat().st_mode))
        for p in found
        if stat.S_IMODE(p.stat().st_mode) != (0o775 if p.is_dir() else 0o664)
    }
    assert not wrong


def test_somebody_elses_run_is_reported(shared_run):
    with open_folder() as folder:
        shutil.copytree(shared_run.folder / "run", folder / "run")
        (folder / "run" / "report.html").unlink()
        for place in [folder / "run", *(folder / "run").rglob("*")]:
            place.chmod(0o555 if place.is_dir() else 0o444)
        done = run_unprivileged(folder, "report", "run")
        assert done.returncode == 0, done.stderr
        assert "validation loss" in done.stdout.lower()  # the figures
        assert "--output" in done.stderr and "run" in done.stderr and "fault of Tercet" not in done.stderr
        done = run_unprivileged(folder, "report", "run", "--output", "mine.html", "--json")
        assert done.returncode == 0, done.stderr
        assert "<svg" in (folder / "mine.html").read_text(encoding="utf-8")
        assert not (folder / "run" / "report.html").exists()
