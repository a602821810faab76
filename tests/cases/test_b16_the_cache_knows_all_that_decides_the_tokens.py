"""B16: anything that decides the tokens makes a new key; a file's time stamp does not."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tercet.data import cache, tokenizer
from tercet.data.prepare import prepare
from tests.texts import section, sentence, write_rows


@pytest.fixture
def setup(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(30)], other="x")
    tokenizer.train((sentence(n) for n in range(30)), 320).save(tmp_path / "words")
    said = []

    def run(**keys):
        said.clear()
        vocabulary = keys.pop("vocabulary", 400)
        seed = keys.pop("seed", 0)
        data = section(tmp_path, keys.pop("train", path), **{"tokenizer": str(tmp_path / "words"), **keys})
        return prepare(data, vocabulary=vocabulary, model_tokenizer=None, seed=seed, say=said.append)

    return tmp_path, path, run, said


def test_hit_and_miss_are_said_with_the_key(setup):
    _, _, run, said = setup
    first = run()
    assert not first.hit and said[0] == f"prepared data: miss, key {first.key}"
    second = run()
    assert second.hit and said == [f"prepared data: hit, key {first.key}"]
    assert second.report == first.report


def test_what_does_not_decide_tokens_is_a_hit(setup):
    folder, path, run, _ = setup
    key = run().key
    os.utime(path, (1, 1))
    assert run().hit
    shutil.copy(path, folder / "elsewhere.jsonl")
    other = run(train=folder / "elsewhere.jsonl", seed=5, vocabulary=999)
    assert other.hit and other.key == key
    assert run(train=[{"path": str(path), "weight": 3}]).hit


def test_what_decides_tokens_is_a_miss(setup, monkeypatch):
    folder, path, run, _ = setup
    keys = [run().key]

    def missed(**changed):
        found = run(**changed)
        assert not found.hit, changed
        keys.append(found.key)

    missed(sequence_tokens=33)
    missed(long_rows="cut")
    missed(bad_rows="skip")
    missed(validation=0.2)
    missed(validation=0.3)
    missed(validation=[str(path)])
    missed(tokenizer="train")
    missed(tokenizer="train", vocabulary=401)
    missed(train=[{"path": str(path), "map": {"text": "other"}}], bad_rows="skip")
    stamp = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Text 7", b"Text 9"))  # same size, same time
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    missed()
    path.write_bytes(content)

    config_file = folder / "words" / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    for change in (
        {"pad_token": config["eos_token"]},
        {"chat_template": "{{ messages }}"},
        {"padding_side": "left"},
    ):
        config_file.write_text(json.dumps({**config, **change}))
        missed()
    backend = json.loads((folder / "words" / "tokenizer.json").read_text())
    backend["added_tokens"].append({**backend["added_tokens"][0], "id": 321, "content": "<|new|>"})
    (folder / "words" / "tokenizer.json").write_text(json.dumps(backend))
    missed()
    monkeypatch.setattr(cache, "version", lambda name: "0.0.0")
    missed()
    assert len(set(keys)) == len(keys)


def test_the_rooms_own_code_is_part_of_the_key(tmp_path, monkeypatch):
    copy = tmp_path / "data"
    shutil.copytree(os.path.dirname(cache.__file__), copy)
    monkeypatch.setattr(cache, "__file__", str(copy / "cache.py"))
    before = cache.key_of({"a": 1})
    assert cache.key_of({"a": 1}) == before
    with (copy / "formats" / "text.py").open("a") as file:
        file.write("# changed\n")
    assert cache.key_of({"a": 1}) != before


def test_a_damaged_folder_is_made_again(setup):
    _, _, run, said = setup
    first = run()
    file = first.folder / "train-0.tokens"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    second = run()
    assert not second.hit and "damaged" in said[0]
    assert file.read_bytes() == content
    (first.folder / "manifest.json").unlink()
    assert not run().hit
