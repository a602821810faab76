"""B05, B15, B26: nothing to train stops before step 1 and shows a row; every dropped row has its reason; sums add up."""

from __future__ import annotations

import json

import pytest

from tercet.data.figures import lines
from tercet.data.loader import IGNORED, Loader
from tercet.data.prepare import prepare
from tercet.errors import InputError
from tests.chats_tiny import folder, prepared, turns
from tests.texts import section, sentence


def chat(n: int, **more):
    return {"messages": turns(f"question {n}?", f"answer {n}."), **more}


def test_most_rows_without_a_trained_token_refuse_to_start(tmp_path):
    rows = [chat(n, weight=0) for n in range(7)] + [chat(n) for n in range(3)]
    with pytest.raises(
        InputError, match=r"7 of 10 chats have nothing to train; the first: .*line 1\n<\|im_start\|>user\nquest"
    ):
        prepared(tmp_path, rows)


def test_some_are_dropped_with_a_count(tmp_path):
    rows = [chat(n, weight=0) for n in range(3)] + [chat(n) for n in range(7)]
    report = prepared(tmp_path, rows).report
    assert report["rows"] == {"read": 10, "train": 7, "validation": 0, "dropped": 3}
    assert report["dropped"]["train"]["nothing to train"]["rows"] == 3


def test_unusual_orders_and_roles_are_kept_or_listed(tmp_path):
    rows = [
        {"messages": turns("Hi", "Hello.", system="Obey the rules")},
        {"messages": [{"role": "assistant", "content": "First."}, *turns("Hi", "Hello.")]},
        {
            "messages": [
                *turns("Hi", "Hello."),
                {"role": "tool", "content": "sun"},
                {"role": "assistant", "content": "Sun."},
            ]
        },
        {"messages": turns("Hi", "")},
        {"messages": turns("  ", "Hello.")},
        {"messages": [{"role": "narrator", "content": "Once"}, *turns("Hi", "Hello.")]},
        {"messages": turns("Hi")},
        {"messages": [{"role": "user", "content": None}, *turns("Hi", "Hello.")[1:]]},
        chat(1),
        chat(1),
    ]
    found = prepared(tmp_path, rows, bad_rows="skip")
    report = found.report
    assert report["rows"] == {"read": 10, "train": 5, "validation": 0, "dropped": 5}
    reasons = {r: d["rows"] for r, d in report["dropped"]["train"].items()}
    assert reasons == {"empty text": 3, "unknown role": 1, "no answer": 1}
    assert report["duplicates"] == 1
    from tercet.data.show import documents

    shown = "".join(piece["text"] for d in documents(found, 10) for piece in d["pieces"])
    assert "system\nObey the rules" in shown and "tool\nsun" in shown


def test_all_dropped_ends_with_the_reasons(tmp_path):
    with pytest.raises(InputError, match="dropped: 2 no answer") as error:
        prepared(tmp_path, [{"messages": turns("Hi")}, {"messages": turns("Ho")}], bad_rows="skip")
    assert error.value.exit_code == 2


def test_what_the_template_refuses_names_line_and_reason(tmp_path):
    rows = [
        chat(1),
        {"messages": [*turns("Hi"), {"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ]
    with pytest.raises(
        InputError, match=r"1 rows cannot be used: the chat template refuses them\n.*line 2, column 1: .*tools"
    ):
        prepared(tmp_path, rows, template="deepseek-llm")
    report = prepared(tmp_path, rows, template="deepseek-llm", bad_rows="skip").report
    assert report["dropped"]["train"]["refused by the template"]["rows"] == 1


def test_long_rows_are_counted_with_their_trained_tokens(tmp_path):
    """B03: exact figures for every rule; no cut row ends in a trained end."""
    long = {"messages": turns("say " * 8, "word " * 60)}
    whole = prepared(tmp_path, [chat(1), long], sequence_tokens=512).report["trained_tokens"]["train"]
    short = prepared(tmp_path, [chat(1)], sequence_tokens=512).report["trained_tokens"]["train"]
    left = {}
    for rule in ("drop", "cut", "split"):
        found = prepared(tmp_path, [chat(1), long], sequence_tokens=64, long_rows=rule)
        left[rule] = found.report["chats"].get("trained tokens left out with them", 0)
        assert found.report["chats"]["rows longer than a sequence"] == 1
        assert found.report["trained_tokens"]["train"] + left[rule] == whole
    assert left["drop"] == whole - short and 0 < left["cut"] < left["drop"] and left["split"] < left["cut"]


def test_the_loader_trains_what_is_marked_on_any_ranks(tmp_path):
    rows = [chat(n) if n % 3 else {"text": sentence(n)} for n in range(30)]
    found = prepared(tmp_path, [*rows, chat(99, weight=0.5)], sequence_tokens=64)
    loader = Loader(found, 6, seed=3)
    steps = range(4)
    alone = [b for s in steps for b in loader.micro_batches(s, rank=0, ranks=1, micro_batch=6)]
    for ranks, micro in ((2, 1), (3, 2), (3, 1)):
        dealt = [
            b
            for s in steps
            for r in range(ranks)
            for b in loader.micro_batches(s, rank=r, ranks=ranks, micro_batch=micro)
        ]
        assert sum(b.trained_tokens for b in dealt) == sum(b.trained_tokens for b in alone)
        assert sum(b.trained_weight for b in dealt) == sum(b.trained_weight for b in alone)
    epoch = [loader._batch([n]) for n in range(loader.rows_per_epoch)]
    assert sum(b.trained_tokens for b in epoch) == found.report["trained_tokens"]["train"]
    end = found.stop_ids[-1]
    ends = sum(int(((b.labels == end) & (b.labels != IGNORED)).sum()) for b in epoch)
    assert ends == 21, "B02: every answer's end is trained, once"
    halves = sum(int(((b.weights == 0.5) & (b.labels != IGNORED)).sum()) for b in epoch)
    assert 0 < halves < 20
    assert sum(b.trained_weight for b in epoch) == found.report["trained_tokens"]["train"] - halves / 2


def test_the_tokenizer_that_is_kept_renders_as_training_did(tmp_path):
    """B16, B23: another template is another key; the saved tokenizer has exactly the one that was used."""
    from tercet.data.control import templates
    from tercet.data.template import find_template

    one, two = (prepared(tmp_path, [chat(1)], template=t) for t in ("chatml", "qwen3"))
    three = prepared(tmp_path, [chat(1)], train_on="all")
    assert len({one.key, two.key, three.key}) == 3
    assert find_template(two.tokenizer_folder) == templates()["qwen3"].read_text(encoding="utf-8").partition("\n")[2]
    again = prepared(tmp_path, [chat(1)], tokenizer=str(two.tokenizer_folder), template=None)
    assert again.report["chats"]["template"] == "the tokenizer's own"


def test_a_tokenizer_trained_on_chats_knows_the_templates_marks(tmp_path):
    rows = [{"messages": turns(sentence(n), sentence(n + 50))} for n in range(30)]
    from tests.chats_tiny import write
    from tests.texts import made

    path = write(tmp_path / "rows.jsonl", rows)
    found = made(tmp_path, path, template="chatml", sequence_tokens=256, vocabulary=340)
    from tercet.data.tokenizer import load

    words = load(found.tokenizer_folder / "tokenizer.json")
    assert found.stop_ids == (words.eos_id, words.backend.token_to_id("<|im_end|>"))
    assert "messages" not in json_of(words) and found.report["kinds"] == {"messages": 30}


def json_of(words) -> str:
    return words.backend.to_str()


def test_b03_what_the_other_rules_would_leave_out_stands_beside(tmp_path):
    """Each rule's own run says what its line in the others' reports had said."""
    file = tmp_path / "chats.jsonl"
    rows = [turns(sentence(n, 2), sentence(n + 50, words)) for n, words in enumerate((3, 3, 50, 55, 60))]
    rows += [turns(sentence(9, 60), sentence(59, 2))]  # the question alone is longer than a sequence
    file.write_text("\n".join(json.dumps({"messages": r}) for r in rows))
    words = folder(tmp_path / "t")
    found = {}
    for rule in ("drop", "cut", "split"):
        data = section(tmp_path, str(file), tokenizer=words, template="chatml", long_rows=rule, sequence_tokens=96)
        found[rule] = prepare(data, vocabulary=None, model_tokenizer=None, seed=0).report
    trained = {rule: report["trained_tokens"]["train"] for rule, report in found.items()}
    for report in found.values():
        assert report["long_rows"]["rows"] == 4
        for rule in ("drop", "cut", "split"):
            said = report["long_rows"][rule]
            assert said["rows_dropped"] == found[rule]["rows"]["dropped"]
            assert said["trained_tokens_left_out"] - report["long_rows"]["drop"]["trained_tokens_left_out"] == (
                trained["drop"] - trained[rule]
            )
    assert found["drop"]["long_rows"]["drop"]["rows_dropped"] == 4
    assert found["cut"]["long_rows"]["cut"]["rows_dropped"] == 1
    shown = "\n".join(lines(found["cut"]))
    assert "4 of those to train are longer than 96 tokens" in shown and shown.count("<- data.long_rows") == 1


def test_b03_texts_too(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": sentence(n, words)}) for n, words in enumerate((2, 40, 60))))
    words = folder(tmp_path / "t")
    found = {}
    for rule in ("drop", "cut", "split"):
        data = section(tmp_path, str(file), tokenizer=words, long_rows=rule, sequence_tokens=64)
        found[rule] = prepare(data, vocabulary=None, model_tokenizer=None, seed=0).report
    for rule, report in found.items():
        gone = found["split"]["trained_tokens"]["train"] - report["trained_tokens"]["train"]
        said = report["long_rows"]
        assert said[rule]["trained_tokens_left_out"] - said["split"]["trained_tokens_left_out"] == gone
        assert said[rule]["rows_dropped"] == report["rows"]["dropped"] and said["rows"] == 2


@pytest.mark.parametrize("first", ["{# <turn> </turn> -#}\n", ""])
def test_tokens_of_a_template_of_ones_own_become_tokens(tmp_path, first):
    """Those that its first line lists, else those that look like control tokens."""
    from tercet.data.tokenizer import load
    from tests.chats_tiny import write
    from tests.texts import made

    begin, end = ("<turn>", "</turn>") if first else ("<|turn|>", "<|over|>")
    own = tmp_path / "own.jinja"
    own.write_text(
        first
        + "{% for m in messages %}"
        + begin
        + "{{ m.role }} {{ m.content }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + begin
        + "assistant {% endif %}"
    )
    path = write(tmp_path / "rows.jsonl", [{"messages": turns(sentence(n), sentence(n + 50))} for n in range(30)])
    found = made(tmp_path, path, template=str(own), sequence_tokens=256, vocabulary=340)
    words = load(found.tokenizer_folder / "tokenizer.json")
    assert (
        found.stop_ids == (words.eos_id, words.backend.token_to_id(end))
        and words.backend.token_to_id(begin) is not None
    )
