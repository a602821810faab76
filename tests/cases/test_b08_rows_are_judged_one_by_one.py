"""B08: a file of mixed rows is sorted row by row; neither order nor extra columns change the outcome."""

from __future__ import annotations

import json
import random

import pytest

from tercet.errors import InputError
from tests.texts import documents, made, sentence

ROWS = [
    {"text": sentence(1)},
    {"messages": [{"role": "user", "content": "a"}]},
    {"text": None},
    {"instruction": "do", "input": "", "output": "done"},
    {"text": sentence(2)},
    {"prompt": "a", "completion": "b"},
    {"text": sentence(3), "source": "somewhere", "score": 3},
    {"conversations": [{"from": "human", "value": "a"}]},
    {"text": 12},
    {"text": sentence(4), "source": None},
]


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_every_row_is_classified_and_the_order_does_not_matter(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    keys = {"template": "chatml", "bad_rows": "skip", "sequence_tokens": 128}
    prepared = made(tmp_path, path, **keys)
    report = prepared.report
    assert report["rows"] == {"read": 10, "train": 6, "validation": 0, "dropped": 4}
    dropped = report["dropped"]["train"]
    assert {r: d["rows"] for r, d in dropped.items()} == {"no answer": 2, "null text": 1, "wrong type": 1}
    assert dropped["null text"]["places"] == [f"{path}, line 3, column 10"]
    assert dropped["no answer"]["places"] == [f"{path}, line 2, column 14", f"{path}, line 8, column 19"]
    assert report["ignored_columns"] == {"source": 2, "score": 1}
    assert report["kinds"] == {
        "text": 4,
        "other": 2,
        "messages": 1,
        "alpaca": 1,
        "prompt": 1,
        "sharegpt": 1,
    }
    for seed in range(3):
        shuffled = random.Random(seed).sample(ROWS, len(ROWS))
        other = made(tmp_path, write(tmp_path / f"{seed}.jsonl", shuffled), **keys)
        assert other.report["kinds"] == report["kinds"]
        assert other.report["rows"] == report["rows"]
        assert documents(other) == documents(prepared)


def test_chats_under_a_tokenizer_without_a_template_name_the_way_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", [ROWS[0], ROWS[3]])
    with pytest.raises(InputError, match="brings no chat template") as error:
        made(tmp_path, path)
    assert "data.template=NAME: chatml" in str(error.value.hint)
