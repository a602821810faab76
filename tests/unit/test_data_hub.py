"""Data sets by their name on the hub, from a cache as the hub's client lays it out; no network."""

from __future__ import annotations

import json

import pytest

from tercet.data.sources import find
from tercet.errors import InputError
from tercet.spec.recipe import SourceSection

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Lays files into the client's cache as a repository, which then can be had without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def repository(name: str, *files: str) -> None:
        place = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(COMMIT)
        for number, file in enumerate(files):
            blob, path = place / "blobs" / str(number), place / "snapshots" / COMMIT / file
            blob.parent.mkdir(exist_ok=True)
            blob.write_text(json.dumps({"text": file}) + "\n")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(blob)

    return repository


def names(path: str, key: str = "data.train.0") -> list[str]:
    return [f.path.name for f in find(SourceSection(path=path), key).files]


@pytest.mark.parametrize("path", ["hub:acme/notes", "acme/notes"])
def test_splits_are_taken_by_the_hubs_rule(put, path):
    put(
        "acme/notes",
        "README.md",
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test.jsonl",
    )
    assert names(path) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names(path, "data.validation.0") == ["test.jsonl"]


def test_of_several_configurations_one_must_be_named(put):
    put("acme/maths", "main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl")
    with pytest.raises(InputError, match="several sets: main, socratic") as caught:
        names("acme/maths")
    assert "hub:acme/maths/main" in caught.value.hint
    assert names("hub:acme/maths/socratic") == ["train.jsonl"]
    with pytest.raises(InputError, match="no folder 'mian'"):
        names("hub:acme/maths/mian")


def test_what_is_not_there_offline_is_one_sentence(put):
    with pytest.raises(InputError, match=r"'acme/nothing' is no file or folder here.*no copy lies in its cache"):
        names("acme/nothing")


def test_a_folder_of_that_name_wins(put, tmp_path):
    put("acme/notes", "data/train.jsonl")
    (tmp_path / "acme" / "notes").mkdir(parents=True)
    (tmp_path / "acme" / "notes" / "own.jsonl").write_text('{"text": "a"}\n')
    assert names("acme/notes") == ["own.jsonl"]


def test_a_misspelt_path_is_no_name(put, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match=r"no file or folder 'texts/note.jsonl'"):
        names("texts/note.jsonl")
