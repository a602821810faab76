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


def test_a_csv_with_semicolons(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text('instruction;input;output\n"Why?";;"Because."\n')
    assert [messages(r) for r in read(path)] == [[ASKED, SAID]]


@pytest.mark.parametrize(
    ("row", "mapping", "asked"),
    [
        ({"instruction": "Why?", "context": "The sky.", "response": "Because."},
         {"instruction": "instruction", "input": "context", "output": "response"}, ["Why?\nThe sky."]),
        ({"query": "So?", "response": "Because.", "history": [["Why?", "Who?"]]},
         {"instruction": "query", "output": "response"}, ["Why?", "So?"]),
    ],
)  # fmt: skip
def test_the_mapping_reads_what_a_question_is_about_and_what_came_before(tmp_path, row, mapping, asked):
    assert chats.mapping_for(row) == mapping
    found, _ = judged(tmp_path, row, map=mapping)
    assert [m["content"] for m in Chat.from_text(found.text).messages if m["role"] == "user"] == asked


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"question": "Why?", "answer": "Because."}, "{prompt: question, completion: answer}"),
        ({"id": 7, "query": "Why?", "response": "Because."}, "{prompt: query, completion: response}"),
        ({"talk": [{"speaker": "user", "utterance": "Why?"}, {"speaker": "bot", "utterance": "Because."}]},
         "{messages: talk, role: speaker, content: utterance}"),
        ({"talk": [{"who": "user", "at": "9:00", "says": "Why?"}, {"who": "bot", "at": "9:01", "says": "Because."}]},
         "{messages: talk, role: who, content: says}"),
        ({"instruction": "Why?", "answer": "Because.", "history": []}, "{instruction: instruction, output: answer}"),
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


def judged(path, row, **keys):
    """What becomes of a row, and what was seen on the way."""
    (file,) = find(SourceSection(path=str(write(path / "r.jsonl", [row])), **keys), "data.train.0").files
    reading = Reading(columns=keys.get("map", {}))
    (found,) = file.read(reading)
    return found, reading.seen


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "Go away.", "label": False},
        {"prompt": "Why?", "completion": "Because.", "label": True},
        {"messages": [ASKED, SAID], "label": False},
        {"instruction": "Why?", "input": "", "output": "Go away.", "kto_tag": False},
    ],
)
def test_rated_answers_are_preferences_and_can_be_weights(tmp_path, row):
    name = next(key for key in row if key in ("label", "kto_tag"))
    found, _ = judged(tmp_path, row)
    assert isinstance(found, Fault) and found.reason == "preference pair" and f"map: {{weight: {name}}}" in found.detail
    mapped, _ = judged(tmp_path, row, map={"weight": name})
    assert Chat.from_text(mapped.text).weight == float(row[name])
    classes, seen = judged(tmp_path, {**row, name: "sky"})  # of a classifier: nobody's rating
    assert not isinstance(classes, Fault) and seen[f"column: {name}"] == 1


@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_a_turn_that_is_not_to_be_trained_says_so_by_loss_too(tmp_path, layout):
    role, content = ("role", "content") if layout == "messages" else ("from", "value")
    said = [("user", None), ("assistant", False), ("user", None), ("assistant", True)]
    turns = [{role: who, content: "words", **({} if loss is None else {"loss": loss})} for who, loss in said]
    found, seen = judged(tmp_path, {layout: turns, "loss": 2.5})
    chat = Chat.from_text(found.text)
    assert [m.get("weight") for m in chat.messages] == [None, 0.0, None, 1.0] and chat.weight == 1.0
    assert seen["column: loss"] == 1  # a row's own is a measurement


def test_what_nothing_reads_in_a_turn_is_counted(tmp_path):
    turns = [ASKED, {**SAID, "channel": "analysis", "prefix": None}, ASKED, {**SAID, "channel": "final"}]
    _, seen = judged(tmp_path, {"messages": turns})
    assert seen["column: channel of a turn"] == 2 and "column: prefix of a turn" not in seen


@pytest.mark.parametrize("name", ["images", "videos", "audios"])
def test_a_row_about_pictures_is_no_text(tmp_path, name):
    row = {"conversations": [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "A cat."}]}
    found, _ = judged(tmp_path, {**row, name: ["a.png"]})
    assert isinstance(found, Fault) and name in found.detail
    assert not isinstance(judged(tmp_path, {**row, name: []})[0], Fault)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_turns_beside_their_rendered_text_are_read(tmp_path, kind):
    row = {"text": "<|im_start|>user\nWhy?<|im_end|>", "messages": [ASKED, SAID]}
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write(path, [row])
    else:
        parquet.write_table(arrow.Table.from_pylist([row]), path)
    for mapping, chat in (({}, True), ({"text": "text"}, False)):
        (file,) = find(SourceSection(path=str(path), map=mapping), "data.train.0").files
        (found,) = file.read(Reading(columns=mapping))
        assert found.chat == chat and ("Because." in found.text) == chat


def test_calls_keep_the_order_of_their_keys_and_no_null_of_arrow(tmp_path):
    """Arrow gives every object of a column the keys of all others, as nulls; JSON's own nulls stay."""
    calls = [
        {"name": "zoom", "arguments": {"z": 1, "a": [{"y": 2, "b": None}]}},
        {"name": "turn", "arguments": {"theta": 1.5}},
    ]
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]}
        for call in calls
    ]
    (found, _) = (judged(tmp_path, row)[0] for row in rows)
    function = Chat.from_text(found.text).messages[1]["tool_calls"][0]["function"]
    assert json.dumps(function) == json.dumps(calls[0])
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (file,) = find(SourceSection(path=str(tmp_path / "rows.parquet")), "data.train.0").files
    read = [Chat.from_text(r.text).messages[1]["tool_calls"][0]["function"]["arguments"] for r in file.read(Reading())]
    assert read == [{"z": 1, "a": [{"y": 2}]}, {"theta": 1.5}]


def test_utf_16_is_named_in_a_csv_too(tmp_path):
    (tmp_path / "q.csv").write_text("question,answer\nWhy?,Because.\n", encoding="utf-16")
    (file,) = find(SourceSection(path=str(tmp_path / "q.csv")), "data.train.0").files
    (found,) = file.read(Reading())
    assert isinstance(found, Fault) and "the file is UTF-16" in found.detail


def test_a_parquet_file_with_damaged_names_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"columnname": ["a"]}), path)
    path.write_bytes(path.read_bytes().replace(b"columnname", b"\x80olumnname"))
    (file,) = find(SourceSection(path=str(path)), "data.train.0").files
    with pytest.raises(InputError, match=r"rows\.parquet"):
        list(file.read(Reading()))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (None, {}),
        ("null", {}),
        (" ", {}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": ', None),
        ([1], None),
        ("sunny", None),
    ],
)
def test_arguments_of_a_call_are_an_object_or_the_row_is_refused(tmp_path, arguments, wanted):
    """A template would write a broken text into the call, and the model would learn broken calls."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (row,) = read(write(tmp_path / "f.jsonl", [{"messages": [ASKED, call]}]))
    if wanted is None:
        assert isinstance(row, Fault) and "a call of turn 2 are no JSON object" in row.detail
    else:
        assert messages(row)[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": wanted}


def test_a_call_of_nothing_but_nulls_is_none(tmp_path):
    """As a table has it in the turns without a call, when one of its turns has one."""
    nulls = {**SAID, "function_call": {"name": None, "arguments": None}}
    assert [messages(r) for r in read(write(tmp_path / "f.jsonl", [{"messages": [ASKED, nulls]}]))] == [[ASKED, SAID]]
