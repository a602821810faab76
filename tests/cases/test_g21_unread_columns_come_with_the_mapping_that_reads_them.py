"""G21: a row whose text has another name is refused with the mapping that reads it; no advice empties the data."""

from __future__ import annotations

import json

import pytest

from tercet.errors import InputError
from tests.texts import made, sentence


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["content", "body", "Document", "beschreibung"])
def test_the_mapping_in_the_message_reads_the_file(tmp_path, name):
    path = write(tmp_path / "a.jsonl", [{"id": str(n), name: sentence(n)} for n in range(12)])
    with pytest.raises(InputError) as refused:
        made(tmp_path, path)
    assert f"map: {{text: {name}}} would read it" in refused.value.message
    assert "bad_rows=skip" not in str(refused.value.hint) and "skipping is no way" in str(refused.value.hint)
    assert made(tmp_path, [{"path": str(path), "map": {"text": name}}]).report["rows"]["train"] == 12


def test_skipping_is_advised_where_it_leaves_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": sentence(1)}, {"content": sentence(2)}])
    with pytest.raises(InputError) as refused:
        made(tmp_path, path)
    assert "bad_rows=skip" in str(refused.value.hint)
    assert made(tmp_path, path, bad_rows="skip").report["rows"]["train"] == 1


def test_a_key_that_nothing_reads_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"content": sentence(1)}])
    with pytest.raises(InputError, match=r"data\.train\.0\.map: unknown key 'txet'.*text"):
        made(tmp_path, [{"path": str(path), "map": {"txet": "content"}}])
