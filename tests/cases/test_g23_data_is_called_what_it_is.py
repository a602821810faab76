"""G23: an array in a .jsonl file is read as one; NaN counts only where it is read; a cache hit names its own files."""

from __future__ import annotations

import json

import pytest

from tercet.errors import InputError
from tests.texts import made, sentence


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n  "])
def test_an_array_is_an_array_whatever_the_file_is_called(tmp_path, indent, start):
    path = tmp_path / "a.jsonl"
    path.write_text(start + json.dumps([{"text": sentence(n)} for n in range(5)], indent=indent), encoding="utf-8")
    assert made(tmp_path, path).report["rows"]["train"] == 5


def test_a_list_among_rows_is_one_damaged_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'[1, 2]\n{{"text": "{sentence(1)}"}}\n')
    assert made(tmp_path, path, bad_rows="skip").report["rows"] == {
        "read": 2,
        "train": 1,
        "validation": 0,
        "dropped": 1,
    }


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_nan_in_a_column_nobody_reads_harms_nothing(tmp_path, word, name):
    row = f'{{"text": "{sentence(1)}", "score": {word}, "deep": [{{"x": {word}}}]}}'
    (tmp_path / name).write_text(row if name == "a.jsonl" else f"[{row}]")
    assert made(tmp_path, tmp_path / name).report["rows"]["train"] == 1
    (tmp_path / name).write_text(row.replace(f'"{sentence(1)}"', word))
    with pytest.raises(InputError, match=r"line 1"):
        made(tmp_path, tmp_path / name)


def test_a_hit_names_the_files_of_this_run(tmp_path):
    reports = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(f'{{"text": "{sentence(1)}"}}\n{{"text": 1}}\n')
        (tmp_path / name / f"{name}.pdf").write_bytes(b"")
        reports.append(made(tmp_path, tmp_path / name, bad_rows="skip"))
    assert [r.hit for r in reports] == [False, True]
    text = json.dumps(reports[1].report)
    assert str(tmp_path / "two" / "a.jsonl") + ", line 2" in text and "two.pdf" in text
    assert str(tmp_path / "one") not in text
