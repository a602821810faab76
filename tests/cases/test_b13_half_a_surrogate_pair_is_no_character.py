r"""B13: a lone \ud83d is valid JSON and no text: refused or skipped, with its line; pairs are kept."""

from __future__ import annotations

import pytest

from tercet.data import tokenizer
from tercet.errors import InputError
from tests.texts import documents, made, sentence


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_half_a_pair_is_reported_and_a_whole_one_kept(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    rows = [
        r'{"text": "half \ud83d here"}',
        r'{"text": "whole \ud83d\ude42 here"}',
        f'{{"text": "{sentence(1)}"}}',
    ]
    path.write_text("\n".join(rows) if kind == "jsonl" else "[" + ",\n".join(rows) + "]")
    column = 10 if kind == "jsonl" else 11
    with pytest.raises(InputError, match=rf"line 1, column {column}: lone surrogate"):
        made(tmp_path, path)
    prepared = made(tmp_path, path, bad_rows="skip")
    assert prepared.report["rows"] == {"read": 3, "train": 2, "validation": 0, "dropped": 1}
    words = tokenizer.load(prepared.tokenizer_folder / "tokenizer.json")
    assert words.document("whole 🙂 here") in documents(prepared)


def test_half_a_pair_in_a_column_nobody_reads_does_no_harm(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(rf'{{"note": "\udc00", "text": "{sentence(1)}"}}')
    assert made(tmp_path, path).report["rows"]["train"] == 1
