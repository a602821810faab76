"""G16, G17, G18: every file of a folder is read or passed over with a reason; splits and dot folders are known."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from tercet.errors import InputError
from tests.texts import made, sentence, write_rows


def texts(prepared):
    """The number of documents per source file name that were trained."""
    return prepared.report["rows"]["train"]


def passed(prepared):
    found = prepared.report["sources"][0]["passed_over"]
    return {why: sorted(os.path.basename(p) for p in f["first"]) for why, f in found.items()}


def test_links_are_followed_once_and_every_ending_is_read(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(real / "linked.jsonl", [sentence(1)])
    (folder / "more").symlink_to(real)
    (real / "back").symlink_to(folder)  # a loop
    (folder / "self").symlink_to(folder)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing")
    rows = "".join(json.dumps({"text": sentence(n)}) + "\n" for n in (2, 3)).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    with pyarrow.output_stream(str(folder / "b.jsonl.zst"), compression="zstd") as out:
        out.write(rows.replace(b"Text", b"Zstd"))
    (folder / "c.csv").write_text(f'text,n\n"{sentence(4)}\nand, more",1\n{sentence(5)},2\n')
    table = pyarrow.table({"text": [sentence(6)]})
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    with pyarrow.OSFile(str(folder / "e.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(pyarrow.table({"text": [sentence(7)]}))
    (folder / "notes.docx").write_bytes(b"x")
    prepared = made(tmp_path, folder)
    assert prepared.report["rows"] == {"read": 9, "train": 9, "validation": 0, "dropped": 0}
    assert prepared.report["duplicates"] == 0
    assert passed(prepared) == {
        "a link to a folder that was read already": ["back", "self"],
        "a broken link": ["gone.jsonl"],
        "no known format": ["notes.docx"],
    }
    glob = made(tmp_path, f"{folder}/**/*.jsonl")
    assert glob.report["rows"]["read"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(tmp_path):
    write_rows(tmp_path / "d" / "a.jsonl", [sentence(1)]) if (tmp_path / "d").mkdir() else None
    write_rows(tmp_path / "d" / "a.jsonl", [sentence(1)])
    (tmp_path / "d" / "shut").mkdir(mode=0)
    assert passed(made(tmp_path, tmp_path / "d")) == {"may not be read (Permission denied)": ["shut"]}


def test_dot_folders_are_passed_over(tmp_path):
    folder = tmp_path / "data"
    for name in (".ipynb_checkpoints", ".git", ".Trash-1000", "sub/.hidden"):
        (folder / name).mkdir(parents=True)
        write_rows(folder / name / "a.jsonl", ["never " + sentence(9)])
    write_rows(folder / "a.jsonl", [sentence(1)])
    write_rows(folder / "sub" / "b.jsonl", [sentence(2)])
    prepared = made(tmp_path, folder)
    assert prepared.report["rows"]["read"] == 2
    assert passed(prepared) == {"its name begins with a dot": [".Trash-1000", ".git", ".hidden", ".ipynb_checkpoints"]}


@pytest.mark.parametrize("layout", ["data/{}-00000-of-00001.jsonl", "{}.jsonl", "{}/rows.jsonl", "my_{}_set.jsonl"])
def test_a_downloaded_data_set_trains_on_its_train_split(tmp_path, layout):
    folder = tmp_path / "set"
    counts = {"train": 3, "validation": 2, "test": 1}
    for base, (split, count) in enumerate(counts.items()):
        path = folder / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, [sentence(100 * base + n) for n in range(count)])
    (folder / "README.md").write_text("# About this set")
    (folder / "LICENSE.txt").write_text("You may.")
    (folder / "dataset_infos.json").write_text('{"default": {"splits": 3}}')
    prepared = made(tmp_path, folder)
    assert prepared.report["rows"]["read"] == 3
    reasons = prepared.report["sources"][0]["passed_over"]
    assert {why: f["files"] for why, f in reasons.items()} == {
        "describes the data": 1,
        "a text beside tables": 2,
        "belongs to the split validation": 1,
        "belongs to the split test": 1,
    }
    held = made(tmp_path, folder, validation=str(folder))
    assert held.report["rows"] == {"read": 5, "train": 3, "validation": 2, "dropped": 0}


def test_names_that_only_look_like_splits_split_nothing(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for n, name in enumerate(("training-manual.jsonl", "contest.jsonl", "latest.jsonl", "restrain.jsonl")):
        write_rows(folder / name, [sentence(n)])
    assert made(tmp_path, folder).report["rows"]["read"] == 4


def test_a_folder_of_texts_is_all_texts(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for n, name in enumerate(("README.md", "train.txt", "test.txt")):
        (folder / name).write_text(sentence(n, 60))
    assert made(tmp_path, folder).report["rows"]["read"] == 3


def test_save_to_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    made_of = {
        s: datasets.Dataset.from_dict({"text": [f"{s} {sentence(n)}" for n in range(4)]}) for s in ("train", "test")
    }
    datasets.DatasetDict(made_of).save_to_disk(str(folder))
    assert made(tmp_path, folder).report["rows"]["read"] == 4
    assert made(tmp_path, folder / "test").report["rows"]["read"] == 4


def test_a_folder_without_rows_says_what_lay_there(tmp_path):
    (tmp_path / "d" / ".git").mkdir(parents=True)
    (tmp_path / "d" / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(InputError, match="passed over: 1 its name begins with a dot, 1 no known format"):
        made(tmp_path, tmp_path / "d")
