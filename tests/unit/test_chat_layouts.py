"""What people write chats in: every layout read into one form, whatever file it lies in."""

from __future__ import annotations

import gzip
import json

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from tests.chats_tiny import write

from tercet.data import formats
from tercet.data.chat import Chat
from tercet.data.formats import chats
from tercet.data.rows import Fault, Reading
from tercet.data.sources import find
from tercet.errors import InputError
from tercet.spec.recipe import SourceSection
from tercet.spec.recipe.sections import SourceSection as Section

ASKED, SAID = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
LAYOUTS = {
    "messages": ({"messages": [ASKED, SAID]}, [ASKED, SAID]),
    "parts": (
        {"messages": [{"role": role, "content": [{"type": "text", "text": t} for t in texts]}
                      for role, texts in (("developer", ("Be ", "brief.")), ("user", ("Why?",)), ("assistant", ("Because.",)))]},
        [{"role": "system", "content": "Be brief."}, ASKED, SAID],
    ),
    "as text": ({"messages": json.dumps([ASKED, SAID])}, [ASKED, SAID]),
    "other name": ({"dialogue": [ASKED, SAID]}, [ASKED, SAID]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}], "system": "S"},
        [{"role": "system", "content": "S"}, ASKED, SAID],
    ),
    "sharegpt calls": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "function_call", "value": json.dumps({"name": "look", "arguments": json.dumps({"at": "sky"})})},
                           {"from": "observation", "value": "blue"}, {"from": "gpt", "value": "Because."}]},
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "blue"}, SAID],
    ),
    "openai calls": (
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"sky\"}"}}]},
                      {"role": "tool", "tool_call_id": "1", "content": "blue"}, SAID]},
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **CALL}]},
         {"role": "tool", "content": "blue", "tool_call_id": "1"}, SAID],
    ),
    "reasoning": (
        {"messages": [ASKED, {**SAID, "reasoning_content": "Hm."}]}, [ASKED, {**SAID, "reasoning_content": "Hm."}],
    ),
    "alpaca": (
        {"instruction": "Why", "input": "blue?", "output": "Because.", "system": "S", "history": [["Why?", "Because."]]},
        [{"role": "system", "content": "S"}, ASKED, SAID, {"role": "user", "content": "Why\nblue?"}, SAID],
    ),
    "prompt": ({"prompt": "Why?", "completion": "Because."}, [ASKED, SAID]),
    "prompt of turns": ({"prompt": [ASKED], "completion": [SAID]}, [ASKED, SAID]),
    "weights": ({"messages": [ASKED, {**SAID, "weight": 0}, ASKED, SAID]}, [ASKED, {**SAID, "weight": 0.0}, ASKED, SAID]),
}  # fmt: skip


def read(path, **keys):
    return list(formats.formats()[formats.detect(path)].read(path, Reading(**keys)))


def messages(row):
    assert not isinstance(row, Fault), row.detail
    return Chat.from_text(row.text).messages


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "gz", "parquet"])
def test_a_layout_is_known_by_itself_in_every_kind_of_file(tmp_path, name, kind):
    row, wanted = LAYOUTS[name]
    path = tmp_path / f"f.{kind}"
    if kind == "gz":
        path = tmp_path / "f.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    elif kind == "parquet":
        parquet.write_table(arrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if kind == "json" else row))
    assert [messages(r) for r in read(path)] == [wanted]


def test_a_csv_of_questions_and_answers(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text('instruction,input,output\n"Why?",,"Because."\n')
    assert [messages(r) for r in read(path)] == [[ASKED, SAID]]


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"question": "Why?", "answer": "Because."}, "{prompt: question, completion: answer}"),
        ({"id": 7, "query": "Why?", "response": "Because."}, "{prompt: query, completion: response}"),
        ({"talk": [{"speaker": "user", "utterance": "Why?"}, {"speaker": "bot", "utterance": "Because."}]},
         "{messages: talk, role: speaker, content: utterance}"),
    ],
)  # fmt: skip
def test_unknown_columns_come_with_the_mapping_that_reads_them(tmp_path, row, mapping):
    path = write(tmp_path / "f.jsonl", [row])
    fault = read(path)[0]
    assert isinstance(fault, Fault) and f"map: {mapping} would read it" in fault.detail
    columns = dict(pair.split(": ") for pair in mapping.strip("{}").split(", "))
    assert [messages(r) for r in read(path, columns=columns)] == [[ASKED, SAID]]


def test_a_preference_pair_is_checked_and_its_chosen_side_can_be_mapped(tmp_path):
    pair = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    path = write(tmp_path / "f.jsonl", [pair])
    fault = read(path)[0]
    assert isinstance(fault, Fault) and fault.reason == "preference pair" and "{completion: chosen}" in fault.detail
    assert [messages(r) for r in read(path, columns={"completion": "chosen"})] == [[ASKED, SAID]]


def test_a_named_layout_is_held_to(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"text": "t", "prompt": "Why?", "completion": "Because."}])
    source = find(SourceSection(path=str(path), format="prompt"), "data.train.0")
    rows = list(source.files[0].read(source.reading(1 << 20)))
    assert [messages(r) for r in rows] == [[ASKED, SAID]]
    source = find(SourceSection(path=str(path), format="sharegpt"), "data.train.0")
    fault = next(iter(source.files[0].read(source.reading(1 << 20))))
    assert isinstance(fault, Fault) and "no column 'conversations'" in fault.detail


def test_the_recipe_knows_every_layout():
    allowed = Section.model_fields["format"].annotation.__args__  # type: ignore[union-attr]
    assert set(chats.layouts()) <= set(allowed)
    with pytest.raises(InputError, match=r"unknown key 'promt'.*prompt"):
        find(SourceSection(path=__file__, map={"promt": "x"}), "data.train.0")


def test_tools_of_either_form_are_one():
    bare = {"name": "look", "parameters": {}}
    for tools in ([bare], [{"type": "function", "function": bare}], json.dumps([bare])):
        row = {"messages": [ASKED, SAID], "tools": tools}
        assert chats.read("messages", row, {}).tools == [{"type": "function", "function": bare}]
