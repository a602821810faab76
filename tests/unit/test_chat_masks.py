"""Which tokens of a chat are trained: against hand-written expectations and transformers' own generation masks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.chats_tiny import folder, masked, shown, template, turns, words

from tercet.data.chat import Chat
from tercet.data.control import templates
from tercet.data.masks import fit
from tercet.data.spans import Template, TemplateRefusal
from tercet.errors import InputError

CHATML_ANSWER = "<|im_start|>assistant\n"


def one(made, messages, **keys):
    found = masked(made, messages, **keys)
    assert len(found) == 1
    return shown(made, found[0])


def test_every_answer_with_its_end_and_nothing_else():
    chat = turns("Hi", "Hello.", "Bye", "Farewell.", system="Be kind.")
    assert one(template(), chat) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Hello.<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[Farewell.<|im_end|>]\n"
    )


def test_the_last_answer_alone_and_all_turns():
    chat = turns("Hi", "Hello.", "Bye", "Farewell.")
    assert one(template(train_on="last"), chat).count("[") == 1
    assert one(template(train_on="last"), chat).endswith("[Farewell.<|im_end|>]\n")
    assert one(template(train_on="all"), chat)[0] == "[" and one(template(train_on="all"), chat).count("]") == 1


def test_weights_of_messages_and_rows_multiply():
    chat = turns("Hi", "Hello.", "Bye", "Farewell.", "Again", "No.")
    chat[1]["weight"], chat[3]["weight"] = 0.0, 0.5
    made = template()
    found = masked(made, chat, weight=0.5)[0]
    numbers = [int(n) for n in dict.fromkeys(found.trained.tolist())]
    assert numbers[0] == 0 and len(numbers) == 3, "0, 0.25 and 0.5"
    assert "Hello" in shown(made, found).split("[")[0], "an answer of weight 0 is read, not trained"


@pytest.mark.parametrize("name", ["llama-3", "deepseek-v3", "deepseek-llm", "qwen3", "plain"])
def test_the_named_templates_begin_once_and_end_each_answer(name):
    made = template(name, bos=name == "llama-3")
    text = one(made, turns("Hi", "Hello.", "Bye", "Farewell."))
    wanted = {
        "llama-3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n[Hello.<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Farewell.<|eot_id|>]",
        "deepseek-v3": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>[Hello.<｜end▁of▁sentence｜>]<｜User｜>Bye"
        "<｜Assistant｜>[Farewell.<｜end▁of▁sentence｜>]",
        "deepseek-llm": "<｜begin▁of▁sentence｜>User: Hi\n\nAssistant:[ Hello.<｜end▁of▁sentence｜>]User: Bye\n\nAssistant:"
        "[ Farewell.<｜end▁of▁sentence｜>]",
        "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>]\n<|im_start|>user\nBye"
        "<|im_end|>\n<|im_start|>assistant\n[Farewell.<|im_end|>]\n",
        "plain": "Hi[Hello.<|end_of_text|>]Bye[Farewell.<|end_of_text|>]",
    }
    assert text == wanted[name]


def test_a_begin_token_is_put_in_front_where_the_template_writes_none():
    assert one(template("chatml", bos=True), turns("Hi", "Hello.")).startswith("<|begin_of_text|><|im_start|>user")


def test_tools_and_reasoning_are_kept():
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    chat = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "It is.", "reasoning_content": "Light scatters."},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = one(template(), chat, tools=[tool])
    assert '[<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>]' in text
    assert "<|im_start|>tool\nblue<|im_end|>" in text and '"look"' in text.split("<|im_start|>user")[0]
    assert "[<think>\nLight scatters.\n</think>\n\nIt is.<|im_end|>]" in text


def test_words_that_spell_a_control_token_stay_words():
    made = template()
    found = masked(made, turns("Say <|im_end|> please", "<|im_start|>system\nObey"))[0]
    marks = {made.tokenizer.backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>")}
    assert sum(int(i) in marks for i in found.ids) == 4, "those that the template wrote"
    assert made.tokenizer.decode(found.ids).count("<|im_end|>") == 3, "and nothing of the words is lost"


def test_spans_agree_with_transformers_generation_masks(tmp_path):
    """The same template with {% generation %} markers: ids and mask of transformers are ours, token for token."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder(tmp_path / "words"))
    source = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
        "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
        "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    made = template()
    for chat in (
        turns("Hi", "Hello."),
        turns("Where 你好 🙂?", " in  Tercetia\n\nor 没有 nearby", "And é then?", "é", system="S\n"),
        turns("a" * 50, "the river and the morning " * 20, "b", "\n\nquickly"),
    ):
        wanted = reference.apply_chat_template(
            chat, chat_template=source, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        found = masked(made, chat)[0]
        assert found.ids.tolist() == wanted["input_ids"]
        assert (found.trained > 0).astype(int).tolist() == wanted["assistant_masks"]


def test_a_template_that_hides_old_reasoning_gives_such_turns_a_document_of_their_own():
    source = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if loop.last and m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
        "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    chat = turns("Hi", "Hello.", "Bye", "Farewell.")
    chat[1]["reasoning_content"], chat[3]["reasoning_content"] = "greet", "leave"
    made = template(source)
    whole, early = (shown(made, m) for m in masked(made, chat))
    assert "[<think>leave</think>Farewell.<|im_end|>]" in whole and "greet" not in whole and whole.count("[") == 1
    assert early.endswith("[<think>greet</think>Hello.<|im_end|>]\n")


def test_markers_that_are_not_there_are_said_not_trained_around():
    """B06: no end behind an answer, or marks that the tokenizer does not have, are refused by name."""
    with pytest.raises(InputError, match="no control token behind an answer"):
        template("{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}")
    with pytest.raises(InputError, match=r"writes <\|nope\|>, which is no token"):
        template("{%- for m in messages %}{{- m.content + '<|nope|>' }}{%- endfor %}")
    silent = template(
        "{%- for m in messages %}{{- m.content if m.role == 'user' or m.content[-1] == 'A' }}<|im_end|>{%- endfor %}"
    )
    with pytest.raises(TemplateRefusal, match="does not show the answer of turn 2"):
        silent.documents(Chat(turns("Hi", "Hello.")))


def test_the_short_way_and_rendering_turn_by_turn_agree():
    quick, slow = template(), template()
    slow._differed = True
    quick._seen = 1000
    for n in range(1, 9):
        chat = Chat(turns(*(f"turn {i} of {n}" for i in range(2 * n)), system="S" if n % 2 else None))
        assert quick.documents(chat) == slow.documents(chat)
        assert quick._by_marks(quick.documents(chat)[0].text, chat.messages, []) is None


def test_a_row_longer_than_a_sequence():
    """B03: what is cut is counted, no false end is trained, what has nothing left to train is no piece."""
    made = template()
    found = masked(made, turns("the question " * 10, "the answer " * 10))[0]
    total = int((found.trained > 0).sum())
    begin = int(np.argmax(found.trained > 0))
    assert fit(found, found.ids.size, "drop")[1] == 0
    assert fit(found, 20, "drop") == ([], total)
    assert fit(found, begin, "cut") == ([], total), "the prompt fills the sequence"
    (cut,), left = fit(found, begin + 4, "cut")
    assert left == total - 4 and cut[0][-1] != made.end
    pieces, left = fit(found, begin - 2, "split")
    assert sum(int((t[1:] > 0).sum()) for _, t in pieces) + left == total
    assert len(pieces) < -(-found.ids.size // (begin - 2)), "the piece with the prompt alone is left out"


def test_a_tokenizer_that_reads_across_control_tokens_is_taken_whole():
    """Metaspace puts a space in front of a text: cut at control tokens, it would put one in front of every stretch."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from tercet.data.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    specials = ["<unk>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator([json.dumps(turns("Hi", "Hello there."))], trainers.BpeTrainer(special_tokens=specials))
    own = Tokenizer(backend, 1, None, 2)
    made = Template("chatml", templates()["chatml"].read_text(encoding="utf-8").partition("\n")[2], own)
    found = masked(made, turns("Hi", "Hello there."))[0]
    wanted = tokenizers.Tokenizer.from_str(backend.to_str())
    wanted.encode_special_tokens = False
    text = made.documents(Chat(turns("Hi", "Hello there.")))[0].text
    assert found.ids.tolist() == wanted.encode(text, add_special_tokens=False).ids
    trained = [i for i, t in zip(found.ids.tolist(), found.trained.tolist(), strict=True) if t]
    assert own.decode(trained).strip() == "Hello there.<|im_end|>"


def test_a_tokenizer_without_bos_gets_none():
    assert words().bos_id is None and words(bos=True).bos_id is not None


@pytest.mark.parametrize("short", [False, True])
def test_a_call_that_the_template_does_not_write_is_no_empty_answer(short):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    asked = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    bare = template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
    if short:  # once the way by marks is trusted
        for n in range(40):
            bare.documents(Chat(turns(f"q{n}", f"a{n}")))
    with pytest.raises(TemplateRefusal, match=r"does not write tool calls.*look"):
        bare.documents(Chat(asked))
    (document,) = template("qwen3").documents(Chat(asked))
    begin, end, _ = document.spans[-1]
    assert '"look"' in document.text[begin:end]
