"""tercet serve under the official client: models, chats, completions, streams, errors; clients that leave; strangers (F05)."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request

import openai
import pytest
import torch
import uvicorn

from tercet.inference.engine import Engine
from tercet.inference.generate import answers
from tercet.inference.sampling import Sampling
from tercet.inference.serve import Server
from tercet.inference.served import open_served
from tests.served_tiny import save_served

TALK = [{"role": "user", "content": "the for 模型"}]


class Running:
    """A server in a thread of its own."""

    def __init__(self, folder, key=None, rows=4, queue=64):
        self.served = open_served(folder)
        self.engine = Engine(self.served, rows, queue)
        self._uvicorn = uvicorn.Server(uvicorn.Config(Server(self.engine, key).app, port=0, log_level="error"))
        self._thread = threading.Thread(target=self._uvicorn.run)

    def __enter__(self):
        self.engine.__enter__()
        self._thread.start()
        until(lambda: self._uvicorn.started)
        self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=100)
        return self

    def __exit__(self, *_):
        self._uvicorn.should_exit = True
        self._thread.join()
        self.engine.__exit__()


def until(true):
    pause = threading.Event()
    for _ in range(3000):
        if true():
            return
        pause.wait(0.02)
    pytest.fail("waited in vain")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def running(folder):
    with Running(folder) as server:
        yield server


def get(url, body=None, **headers):
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_models(running):
    assert [m.id for m in running.client.models.list()] == ["tiny"]
    assert running.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        running.client.chat.completions.create(model="other", messages=TALK)


def test_completion_is_generates_text(running):
    expected = answers(running.served, ["the for", "is"], 9, Sampling())
    got = running.client.completions.create(model="tiny", prompt=["the for", "is"], max_tokens=9, temperature=0)
    assert [c.text for c in got.choices] == [a.text for a in expected]
    assert got.usage.completion_tokens == sum(len(a.tokens) for a in expected)
    assert got.choices[0].finish_reason == expected[0].finish


def test_chat_streamed_and_whole_are_one_text(running):
    whole = running.client.chat.completions.create(
        model="tiny", messages=TALK, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=3
    )
    text = whole.choices[0].message.content
    scored = whole.choices[0].logprobs.content
    assert len(scored) == whole.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in scored)
    ends = running.served.tokenizer.backend.id_to_token(running.served.tokenizer.eos_id).encode()
    assert (
        b"".join(bytes(entry.bytes) for entry in scored)
        .removesuffix(ends)
        .decode(errors="ignore")
        .startswith(text.strip("\ufffd"))
    )
    stream = running.client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert "".join(p.choices[0].delta.content or "" for p in pieces[:-1]) == text
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    stop = text[3:5]
    cut = running.client.chat.completions.create(model="tiny", messages=TALK, max_tokens=20, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_tokens_of_a_completion_have_their_places_and_names_of_their_own(running):
    """Alternatives that are parts of characters would all be spelled with one and the same sign."""
    ask = {"model": "tiny", "prompt": "the for 模型", "max_tokens": 12, "temperature": 0, "logprobs": 20}
    (choice,) = running.client.completions.create(**ask).choices
    found = choice.logprobs
    assert [len(best) for best in found.top_logprobs] == [20] * len(found.tokens)
    said, places = b"", []
    for token in found.tokens:
        places.append(len(said.decode(errors="ignore")))
        said += bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    assert places == found.text_offset and said.decode(errors="replace").startswith(choice.text.rstrip("\ufffd"))
    streamed = running.client.completions.create(**ask, stream=True)
    assert [at for part in streamed for at in part.choices[0].logprobs.text_offset] == found.text_offset


def test_n_and_seeds(running):
    ask = {"model": "tiny", "messages": TALK, "max_tokens": 8, "temperature": 1.5, "n": 3, "seed": 5}
    one, two = (running.client.chat.completions.create(**ask) for _ in range(2))
    texts = [c.message.content for c in one.choices]
    assert len(set(texts)) > 1
    assert texts == [c.message.content for c in two.choices]


def test_eight_at_once_get_their_own_answers(running):
    prompts = [f"the {n} statement " * (1 + n % 3) for n in range(8)]
    expected = [a.text for a in answers(running.served, prompts, 12, Sampling())]

    async def ask():
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=100)

        async def one(prompt):
            pieces = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
            )
            return "".join([p.choices[0].text async for p in pieces])

        return await asyncio.gather(*(one(p) for p in prompts))

    assert asyncio.run(ask()) == expected


BAD = [
    b"{",
    b"\xff",
    b"[]",
    b"[" * 50_000,
    {},
    {"model": "tiny"},
    {"model": "tiny", "messages": []},
    {"model": "tiny", "messages": "hi"},
    {"model": "tiny", "messages": [{"role": "king", "content": "x"}]},
    {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"model": "tiny", "messages": TALK, "n": -1},
    {"model": "tiny", "messages": TALK, "n": 10**9},
    {"model": "tiny", "messages": TALK, "max_tokens": 0},
    {"model": "tiny", "messages": TALK, "temperature": "hot"},
    {"model": "tiny", "messages": TALK, "top_p": 2},
    {"model": "tiny", "messages": TALK, "stop": [1]},
    {"model": "tiny", "messages": [{"role": "user", "content": "x " * 5000}]},
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_bad_requests_have_a_sentence_and_a_code(running, body):
    status, text = get(f"{running.url}/v1/chat/completions", body)
    error = json.loads(text)["error"]
    assert status == 400 and error["message"] and error["code"], text


def test_other_addresses_methods_and_sizes(running):
    for path in ("/v1/nothing", "/../../etc/passwd", "/v1/models/..%2f..%2fetc"):
        status, text = get(running.url + path)
        assert status == 404 and json.loads(text)["error"]["message"]
    assert get(f"{running.url}/v1/chat/completions")[0] == 405
    assert get(f"{running.url}/v1/completions", b"x" * (5 * 2**20))[0] == 413


def test_strangers_get_nothing(running):
    url = f"{running.url}/v1/models"
    assert get(url, Origin="https://evil.example")[0] == 403
    assert get(url, Host="evil.example")[0] == 403
    assert get(url, Origin=running.url)[0] == 200


def test_health_metrics_and_page(running):
    assert json.loads(get(f"{running.url}/health")[1])["status"] == "ok"
    assert "tercet_tokens " in get(f"{running.url}/metrics")[1]
    page = get(f"{running.url}/")[1]
    assert "<textarea" in page and "innerHTML" not in page and "http" not in page.lower().replace("http://www.w3", "")


def test_a_client_that_leaves_frees_its_row_and_a_full_queue_says_so(folder):
    with Running(folder, rows=1, queue=1) as server:
        server.served.stop = ()
        step, pause = server.engine._batch.step, threading.Event()
        server.engine._batch.step = lambda: pause.wait(0.05) or step()  # an answer that takes seconds
        ask = {"model": "tiny", "prompt": "the", "max_tokens": 200, "temperature": 2.0, "stream": True}
        stream = server.client.completions.create(**ask)
        next(iter(stream))
        stream.close()
        until(lambda: server.engine.state["running"] == 0)
        assert server.engine.counts["cancelled"] == 1
        server.engine.most_waiting = 0
        with pytest.raises(openai.RateLimitError, match="more requests wait"):
            server.client.completions.create(model="tiny", prompt="the")


def test_a_key(folder):
    with Running(folder, key="secret") as server:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client.models.list()
        assert len(list(server.client.with_options(api_key="secret").models.list())) == 1


def test_a_text_that_cannot_be_taken_in_fails_alone(folder, monkeypatch):
    with Running(folder) as server:
        plain, seen = server.engine._batch.add, []

        def add(*args, **kwargs):
            seen.append(1)
            if len(seen) == 1:
                raise torch.OutOfMemoryError("no room for its rows")
            return plain(*args, **kwargs)

        monkeypatch.setattr(server.engine._batch, "add", add)
        with pytest.raises(openai.InternalServerError):
            server.client.with_options(max_retries=0).chat.completions.create(model="tiny", messages=TALK, max_tokens=3)
        answer = server.client.chat.completions.create(model="tiny", messages=TALK, max_tokens=3)
        assert answer.choices[0].finish_reason
        assert get(f"{server.url}/health")[0] == 200
