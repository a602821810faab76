"""tercet generate and tercet chat: prompts of files, streams, histories, commands; templates as transformers renders them."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.served_tiny import CHATML, save_served
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.inference.batch import Batch
from tercet.inference.chat import Chat
from tercet.inference.generate import answers, stream
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served
from tercet.model import decode

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "模型🙂?"},
    {"role": "assistant", "content": "<|im_end|> is text here"},
    {"role": "user", "content": "and"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(folder):
    return open_served(folder)


def run(*arguments, **more):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True, **more)


def test_a_chat_has_the_ids_that_transformers_gives_and_one_bos(served, folder):
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    ids = served.chat_ids(TALK)
    assert served.tokenizer.decode(ids) == "<|begin_of_text|>" + theirs
    served.template = "{{ bos_token }}" + CHATML
    assert served.chat_ids(TALK) == ids
    served.template = CHATML


def test_messages_that_a_template_refuses_have_a_sentence(served):
    served.template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"refuses these messages: roles must alternate"):
        served.chat_ids(TALK)
    served.template = "{{ ''.__class__.__mro__ }}"  # the sandbox
    with pytest.raises(InputError, match=r"refuses"):
        served.chat_ids(TALK)
    served.template = CHATML


def test_streamed_text_is_the_answer_and_stops_end_it(served):
    prompts = ["the for", "a", "模型"]
    whole = answers(served, prompts, 24, Sampling(), rows=2)
    for answer in whole:
        batch = Batch(served.model, 1, vocabulary=served.vocabulary)
        pieces = list(stream(served, batch, served.prompt_ids(answer.prompt), 24, Sampling(), ()))
        assert "".join(pieces) == answer.text
        assert not batch.texts
    text = max((a.text for a in whole), key=len)
    prompt = next(a.prompt for a in whole if a.text == text)
    stop = text[5:7]
    cut = answers(served, [prompt], 24, Sampling(), [stop])[0]
    assert (cut.text, cut.finish) == (text[: text.index(stop)], "stop")


def test_a_file_of_prompts_as_json(folder, tmp_path):
    rows = [{"prompt": "the for"}, {"prompt": "is\nused"}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    done = run("generate", folder, "--file", tmp_path / "p.jsonl", "--tokens", 5, "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["prompt"] for f in found] == ["the for", "is\nused"]
    alone = run("generate", folder, "the for", "--tokens", 5).stdout
    assert alone == "the for" + found[0]["text"] + "\n"


@pytest.mark.parametrize(
    ("text", "words"), [("{}", "line 1: a row is"), ('{"prompt": 3}', "line 1: prompt is no text"), ("", "no prompt")]
)
def test_a_bad_file_of_prompts(folder, tmp_path, text, words):
    (tmp_path / "p.jsonl").write_text(text)
    done = run("generate", folder, "--file", tmp_path / "p.jsonl")
    assert isinstance(done.exception, InputError) and words in str(done.exception)


def test_a_chat_in_the_terminal(folder, tmp_path):
    lines = [
        "hello",
        "/again",
        "/set temprature=1",
        "/set temperature=0",
        "/undo",
        "/save chat.json",
        "/nothing",
        "hello",
    ]
    lines[5] = f"/save {tmp_path / 'chat.json'}"
    done = run("chat", folder, "--system", "Be brief.", "--tokens", 6, input="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    assert "did you mean temperature" in done.output
    assert "temperature is 0.0." in done.output and "0 questions are left" in done.output
    assert "/nothing is not a command" in done.output
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert saved == [{"role": "system", "content": "Be brief."}]


def test_history_reaches_the_model_and_its_beginning_is_not_computed_again(served):
    talk = Chat(served, None, 6, {"temperature": 0.0})
    first = "".join(talk.ask("the for statement is used"))
    "".join(talk.ask("and"))
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert talk.messages[1]["content"] == first
    ids = served.chat_ids(talk.messages[:3])
    expected = decode.generate(served.model, 2, ids, 6, vocabulary=served.vocabulary, stop=served.stop)
    assert talk.messages[3]["content"] == served.decode(expected)
    again = served.chat_ids(talk.messages[:1])
    assert talk._batch.prefixes.longest((*again, 1))[0] >= len(again)


def test_a_model_without_a_template_continues(tmp_path):
    folder = save_served(tmp_path, template=None)
    done = run("chat", folder, "--tokens", 4, input="the for\n")
    assert "no chat template" in done.output and done.exit_code == 0


def test_chats_and_prompts_at_once_do_not_change_each_others_ids(served):
    """Control tokens are control tokens in a template and text in a prompt, whatever other threads do meanwhile."""
    text = "<|im_start|>user and <|im_end|> " * 50
    chat, prompt = served.chat_ids(TALK), served.prompt_ids(text)
    control = served.tokenizer.backend.token_to_id("<|im_start|>")
    assert control in chat and control not in prompt

    def ask(number: int) -> bool:
        return served.chat_ids(TALK) == chat if number % 2 else served.prompt_ids(text) == prompt

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ask, range(400)))
    finally:
        sys.setswitchinterval(interval)
