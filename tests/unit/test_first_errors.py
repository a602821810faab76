"""What somebody meets who tries Tercet for the first time: errors that name the line, and the next step."""

from __future__ import annotations

import errno
import json
import socket

import pytest

from tercet import cli
from tercet.cli.init import run as init
from tercet.data.sources import find_all
from tercet.errors import InputError
from tercet.inference.served import open_served
from tercet.spec.recipe import load_recipe, with_place
from tercet.spec.run_folder import RunFolder
from tercet.training import launched
from tercet.training.lock import RunLock

RECIPE = """\
model: first-light
data:
  tokenizer: train
  train: {train}
train: {{steps: 3}}
"""


@pytest.mark.parametrize(
    ("train", "overrides", "place"),
    [
        ("no-such/*.jsonl", [], "mine.yaml, line 4: data.train: nothing matches"),
        ("[{path: no-such/*.jsonl}]", [], "mine.yaml, line 4: data.train.0: nothing matches"),
        (
            "mine.yaml",
            ["data.train=no/*.txt"],
            "'data.train=no/*.txt' on the command line: data.train: nothing matches",
        ),
    ],
)
def test_data_that_is_not_there_names_the_recipes_line(tmp_path, monkeypatch, train, overrides, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE.format(train=train))
    with pytest.raises(InputError) as caught:
        find_all(load_recipe("mine.yaml", overrides).data)
    told = with_place(caught.value, "mine.yaml", overrides)
    assert told.message.startswith(place)
    assert str(tmp_path) in (told.hint or "")


def test_an_error_without_a_key_stays_as_it_is(tmp_path):
    error = InputError("bad.jsonl, line 2: bad JSON")
    assert with_place(error, tmp_path / "never-read.yaml") is error


@pytest.mark.parametrize("name", ["texts", "texts/a.jsonl", "package:json/tool.py"])
def test_data_that_is_prepared_without_a_recipe_has_no_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").touch()
    error = InputError("data.train: no row is left to train on")
    assert with_place(error, name) is error


def test_init_refuses_files_without_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"nothing to train on: empty\.jsonl"):
        init(["empty.jsonl"], None, "recipe.yaml", False)
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_recipe_is_no_model(tmp_path):
    recipe = tmp_path / "my-recipe.yaml"
    recipe.write_text(RECIPE.format(train="x.txt"))
    with pytest.raises(InputError, match="is a recipe, not a trained model") as caught:
        open_served(recipe)
    assert f"tercet train {recipe}" in (caught.value.hint or "")


def test_a_damaged_summary_has_a_way_out(tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": ')
    with pytest.raises(InputError, match=r"summary\.json cannot be read") as caught:
        RunFolder(tmp_path).read_summary()
    assert f"tercet train --resume {tmp_path}" in (caught.value.hint or "")


def test_ranks_that_left_no_word_have_ended_all_the_same(tmp_path, monkeypatch):
    """Under a launcher, on a disk too full for any report."""
    monkeypatch.setattr(launched, "GRACE_SECONDS", 0.0)
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    error, teller = launched._why(run, [None, None])
    assert teller == 0
    assert "rank 0 ended with code 1" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "7",
        '{"ranks": 5}',
        '{"supervisor": [], "ranks": [3]}',
        '{"supervisor": {"pid": 1e300}}',
        "\ufeff{}",
    ]
    + ['{"supervisor": {"host": null, "pid": "x", "started": []}}', '{"ranks": [{"pid": -1, "started": "x"}]}'],
)
def test_a_damaged_lock_that_nobody_holds_is_taken(tmp_path, content):
    path = tmp_path / "run.lock"
    path.write_text(content.replace("null", json.dumps(socket.gethostname())) if "host" in content else content)
    lock = RunLock(path)
    assert json.loads(path.read_text())["ranks"] == []
    lock.release()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors
    ],
)
def test_a_full_disk_is_said_whoever_met_it(monkeypatch, capsys, error):
    """Every command: what a library raises, also as the cause of something else, is no fault of Tercet."""
    wrapped = ValueError("the file could not be written")
    wrapped.__cause__ = error
    for raised in (error, wrapped):

        def fail(raised=raised):
            raise raised

        monkeypatch.setattr(cli, "app", fail)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert ended.value.code == 1 and "fault of Tercet" not in said
        assert "the disk is full" in said or "/data/x: Disk quota exceeded" in said
    monkeypatch.setattr(cli, "app", lambda: [][0])
    with pytest.raises(SystemExit):
        cli.main()
    assert "fault of Tercet" in capsys.readouterr().err
