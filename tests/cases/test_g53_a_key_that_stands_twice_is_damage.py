"""G53: an object with the same key twice is a damaged row, at any depth, in every JSON format."""

from __future__ import annotations

import json

import pytest

from tercet.errors import InputError
from tests.texts import documents, made, sentence

A, B = sentence(1), sentence(2)
TWICE = [
    f'{{"text": "{A}", "text": "{B}"}}',
    f'{{"text": "{A}", "text" : "{A}"}}',
    f'{{"text": "{A}", "meta": {{"n": 1, "n": 2}}}}',
    f'{{"text": "{A}", "list": [[{{"k": 1}}, {{"k": 1, "k"\t: 1}}]]}}',
    f'{{"text": "{A}", "te\\u0078t": "{B}"}}',
]
ONCE = [
    f'{{"text": "{A} \\"text\\": \\"x\\": "}}',
    f'{{"text": "{B}", "a": {{"k": 1}}, "b": {{"k": 1}}, "c": [{{"k": "\\":"}}, {{"k": 2}}]}}',
]


def write(path, rows):
    path.write_text("\n".join(rows) if path.suffix == ".jsonl" else "[" + ",".join(rows) + "]")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("row", TWICE)
def test_it_is_named_and_never_trained(tmp_path, name, row):
    path = write(tmp_path / name, [*ONCE, row])
    key = "n" if "meta" in row else "k" if "list" in row else "text"
    with pytest.raises(InputError, match=rf"repeated key: the key '{key}' stands twice"):
        made(tmp_path, path)
    found = made(tmp_path, path, bad_rows="skip")
    assert found.report["rows"] == {"read": 3, "train": 2, "validation": 0, "dropped": 1}
    expected = made(tmp_path, write(tmp_path / f"good-{name}", ONCE))
    assert documents(found) == documents(expected)


def test_a_csv_whose_header_repeats_a_name(tmp_path):
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(InputError, match="'text' stands twice"):
        made(tmp_path, tmp_path / "a.csv", bad_rows="skip")


def test_the_search_costs_no_second_parse_of_ordinary_rows(tmp_path, monkeypatch):
    from tercet.data.formats import jsonl

    monkeypatch.setattr(jsonl, "repeated_key", lambda text: pytest.fail("parsed twice"))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": sentence(n), "meta": {"a": [1, {"b": 2}]}}) + "\n" for n in range(9)))
    assert made(tmp_path, path).report["rows"]["train"] == 9
