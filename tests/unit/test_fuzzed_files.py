"""Mutated files of chats: each gives a report or an error sentence, never a traceback, never a hang."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tempfile
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.chats_tiny import folder, turns
from tests.texts import made

from tercet.errors import TercetError

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
ROWS = [
    {"messages": turns("Hi 你好", "Hello 🙂."), "weight": 0.5},
    {"messages": [*turns("Why?"), CALL, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": [{"name": "f"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f"}'}, {"from": "gpt", "value": "b"}]},
    {"instruction": "do", "input": "it", "output": "done", "history": [["q", "a"]], "system": "s"},
    {"prompt": "q", "completion": "a <|im_end|> \ufdd0"},
    {"chosen": "a", "rejected": "b", "prompt": "c"},
    {"text": "a plain text"},
]  # fmt: skip


def seeds() -> dict[str, bytes]:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    table = io.BytesIO()
    parquet.write_table(arrow.table({"prompt": ["q"] * 3, "completion": ["a", None, "b"]}), table)
    return {
        "f.jsonl": lines,
        "f.json": json.dumps(ROWS).encode(),
        "f.csv": b'prompt,completion\nq,a\n"q\n2",b\n',
        "f.parquet": table.getvalue(),
        "f.jsonl.gz": gzip.compress(lines, mtime=0),
    }


SEEDS = seeds()
BITS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"\r\n", b"null", b"NaN", b"\xff", b"\xef\xbb\xbf", b"\\ud83d", b"\x00",
        b'"messages"', b'"role"', b'"system"', b'"content": 5', b'"weight": -1', b'"weight": 1e400', b"1e999", b"[[[[[[", b"<|im_start|>",
        b"-0", b"true", b'{"type": "image_url"}', b'"value"', b'"from"', "\u2028".encode()]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(SEEDS)))
    content = bytearray(SEEDS[name])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        way = draw(st.sampled_from(["put", "cut", "twice", "swap", "end"]))
        if way == "put":
            content[at : at + length] = draw(st.sampled_from(BITS))
        elif way == "cut":
            del content[at : at + length]
        elif way == "twice":
            content[at:at] = content[max(0, at - 30) : at]
        elif way == "swap" and at < len(content):
            content[at] = draw(st.integers(0, 255))
        elif way == "end":
            del content[max(at, 1) :]
    return name, bytes(content)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("fuzz") / "words")


NUMBERS = itertools.count()


def read(words: str, name: str, content: bytes, rule: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(content)
        keys = {
            "template": "chatml",
            "tokenizer": words,
            "sequence_tokens": 48,
            "long_rows": ("drop", "cut", "split")[next(NUMBERS) % 3],
        }
        report, sentence = None, ""
        try:
            report = made(Path(place), path, vocabulary=None, bad_rows=rule, **keys).report  # type: ignore[arg-type]
        except TercetError as error:
            sentence = error.message
        if report is None:
            assert sentence.encode() and "fault of Tercet" not in sentence
            return
        rows = report["rows"]
        assert rows["read"] == rows["train"] + rows["dropped"]
        assert rows["dropped"] == sum(d["rows"] for d in report["dropped"]["train"].values())
        json.dumps(report).encode()


OPTIONS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=40, **OPTIONS)  # type: ignore[arg-type]
@given(damaged(), st.sampled_from(["stop", "skip"]))
def test_a_damaged_file_gives_a_report_or_a_sentence(words, file, rule):
    read(words, *file, rule)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=1000, **OPTIONS)  # type: ignore[arg-type]
@given(damaged(), st.sampled_from(["stop", "skip", "skip"]))
def test_a_thousand_damaged_files(words, file, rule):
    read(words, *file, rule)
