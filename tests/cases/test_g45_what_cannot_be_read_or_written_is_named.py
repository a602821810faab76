"""G45: a recipe, run folder or data file that this user may not read or write: the path, and who may."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from tercet.errors import InputError, TercetError, file_error
from tests.cases.unprivileged import open_folder, run_unprivileged
from tests.cli import RECIPE


@pytest.fixture
def folder():
    with open_folder() as found:
        (found / "small.yaml").write_text(RECIPE)
        (found / "small.yaml").chmod(0o644)
        yield found


def refused(done, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    for word in (*words, "belongs to"):
        assert word in done.stderr, done.stderr
    assert "fault of Tercet" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "train", "prepare"])
def test_a_recipe_that_cannot_be_read(folder, command):
    (folder / "small.yaml").chmod(0)
    refused(run_unprivileged(folder, command, "small.yaml"), "small.yaml", "mode 0000")


def test_a_recipe_inside_a_folder_that_cannot_be_entered(folder):
    (folder / "closed").mkdir()
    shutil.copy(folder / "small.yaml", folder / "closed" / "inside.yaml")
    (folder / "closed").chmod(0)
    refused(run_unprivileged(folder, "plan", "closed/inside.yaml"), "inside.yaml", f"the folder {folder / 'closed'}")


def test_no_place_for_the_run(folder):
    folder.chmod(0o555)
    try:
        done = run_unprivileged(folder, "train", "small.yaml", XDG_CACHE_HOME="/tmp", XDG_CONFIG_HOME="/tmp")
        refused(done, "runs", f"the folder {folder} ")
        done = run_unprivileged(folder, "train", "small.yaml", "--output", "own", XDG_CACHE_HOME="/tmp")
        refused(done, "output.folder", f"the folder {folder} ")
    finally:
        folder.chmod(0o777)


@pytest.mark.parametrize("command", [("train", "--resume", "run"), ("report", "run"), ("generate", "run", "x")])
def test_a_run_folder_that_cannot_be_entered(folder, command):
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text(RECIPE)
    (folder / "run").chmod(0)
    refused(run_unprivileged(folder, *command), "run")


def test_a_run_folder_that_cannot_be_written(folder, finished):
    cli, run = finished
    shutil.copytree(cli.folder / run, folder / "run")
    for place in [folder / "run", *(folder / "run").rglob("*")]:
        place.chmod(0o555 if place.is_dir() else 0o444)
    refused(run_unprivileged(folder, "train", "--resume", "run", "train.steps=40"), str(folder / "run"))


def test_data_that_cannot_be_read(folder):
    (folder / "text.txt").write_text("text " * 1000)
    (folder / "text.txt").chmod(0)
    done = run_unprivileged(folder, "prepare", "small.yaml", "data.train=text.txt")
    refused(done, "text.txt")


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EROFS, InputError, "only be read"),
        (errno.ENOSPC, TercetError, "Make room"),
        (errno.EMFILE, TercetError, "ulimit -n"),
        (errno.EISDIR, InputError, "directory"),
    ],
)
def test_each_refusal_of_the_file_system_is_told(tmp_path, number, kind, words):
    told = file_error(OSError(number, os.strerror(number), str(tmp_path / "thing")))
    assert isinstance(told, kind) and str(tmp_path / "thing") in str(told) and words in str(told)


def test_what_names_no_path_is_not_a_matter_of_files():
    assert file_error(OSError("something")) is None
    assert file_error(ConnectionResetError(errno.ECONNRESET, "reset")) is None
