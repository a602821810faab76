"""B10: byte order mark and CRLF change nothing; line breaks inside a text are kept."""

from __future__ import annotations

import json

from tercet.data import tokenizer
from tests.texts import documents, made, sentence

TEXTS = [*(sentence(n) for n in range(4)), "first line\nsecond line\r\nthird\n\nlast"]


def test_the_same_rows_in_three_dresses(tmp_path):
    body = "\n".join(json.dumps({"text": t}) for t in TEXTS) + "\n"
    files = {
        "lf": body.encode(),
        "crlf": body.replace("\n", "\r\n").encode(),
        "bom": b"\xef\xbb\xbf" + body.replace("\n", "\r\n").encode(),
    }
    found, reports = {}, {}
    for name, content in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content)
        prepared = made(tmp_path, path, sequence_tokens=128)
        found[name], reports[name] = documents(prepared), prepared.report["seen"]
        words = tokenizer.load(prepared.tokenizer_folder / "tokenizer.json")
        assert any(words.decode(d[1:-1]) == TEXTS[-1] for d in found[name])
    assert found["lf"] == found["crlf"] == found["bom"]
    assert reports == {"lf": {}, "crlf": {"CRLF": 5}, "bom": {"byte order mark": 1, "CRLF": 5}}


def test_plain_text(tmp_path):
    found = []
    for name, content in (("a", "one\ntwo\n"), ("b", "\ufeffone\r\ntwo\r\n")):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(content.encode() * 1)
        found.append(documents(made(tmp_path, path)))
    assert found[0] == found[1]
