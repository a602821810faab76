"""tercet serve under what strangers send: every request of its OpenAPI document and around it, floods, clients that die."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from tests.e2e.test_serve import Running, get, until
from tests.served_tiny import save_served

SENTENCES = 4  # words at least


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Running(save_served(tmp_path_factory.mktemp("served") / "tiny"), rows=4, queue=16) as server:
        server.served.suggested = {}
        yield server


POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/chat/completions", POSITIVE),
        ("/v1/chat/completions", NEGATIVE),
        ("/v1/completions", POSITIVE),
        ("/v1/completions", NEGATIVE),
        ("/v1/models/{name}", POSITIVE),
    ],
)
def test_whatever_is_sent_the_answer_is_right_or_a_sentence(running, path, mode):
    """Requests that fit the document and requests that do not: wrong types, missing fields, numbers out of range."""
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    operation = schema[path]["POST" if path.endswith("completions") else "GET"]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def send(case):
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):  # else none would know the name
                case.body["model"] = "tiny"
            for limit in ("max_tokens", "max_completion_tokens"):  # few tokens, unless what stands there is wrong
                if case.body.get(limit) is None or isinstance(case.body[limit], int):
                    case.body[limit] = min(case.body.get(limit) or 2, 2)
        answer = case.call(timeout=100)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert len(error["message"].split()) >= 2 and error["code"] and "Traceback" not in answer.text

    send()


def ask(running, path="completions", **body):
    status, text = get(f"{running.url}/v1/{path}", {"model": "tiny", **body})
    return status, json.loads(text)


TALK = [{"role": "user", "content": "the"}]
WRONG = [
    ("completions", {"prompt": "the", "max_tokens": -1}, "max_tokens"),
    ("completions", {"prompt": "the", "n": -2}, "n"),
    ("completions", {"prompt": "the", "echo": True, "logprobs": 1}, "echo"),
    ("completions", {"prompt": "the", "best_of": 4}, "best_of"),
    ("completions", {"prompt": "the", "logit_bias": {"5": 100}}, "logit_bias"),
    ("chat/completions", {"messages": TALK, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"messages": TALK, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": TALK, "frequency_penalty": 0.5}, "frequency_penalty"),
    ("chat/completions", {"messages": TALK, "continue_final_message": True}, "continue_final_message"),
    ("chat/completions", {"messages": TALK, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("completions", {"prompt": "the", "top_k": -5}, "top_k"),
    ("completions", {"prompt": "the", "max_tokens": "12"}, "max_tokens"),
    ("completions", {"prompt": ["the", 7]}, "prompt"),
    ("completions", {"prompt": [[1, 2]]}, "prompt"),
    ("completions", {"prompt": "word " * 200_000}, "prompt"),
    ("completions", {"prompt": "模" * 300_000}, "prompt"),
    ("completions", {"prompt": ["the"] * 5, "n": 4}, "n"),
    ("chat/completions", {"messages": TALK, "n": 17}, "n"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x " * 200_000}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("chat/completions", {"messages": TALK, "temperature": -0.5}, "temperature"),
    ("chat/completions", {"messages": TALK, "stream": "yes"}, "stream"),
    ("chat/completions", {"messages": TALK, "temprature": 0.2}, "temprature"),
    ("completions", {"prompt": "the", "max_token": 3}, "max_token"),
]


@pytest.mark.parametrize(("path", "body", "field"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_requests_name_the_field(running, path, body, field):
    status, answer = ask(running, path, **body)
    assert status == 400, answer
    assert answer["error"]["param"].startswith(field) and len(answer["error"]["message"].split()) >= SENTENCES


def test_a_template_that_breaks_on_a_message_answers_a_sentence(running):
    template = running.served.template
    try:
        for broken in ("{{ 1 // 0 }}", "{{ messages.nothing.more }}", "{{ messages[0]['content'] + 1 }}"):
            running.served.template = broken
            status, answer = ask(running, "chat/completions", messages=TALK)
            assert status == 400 and "refuses these messages" in answer["error"]["message"]
    finally:
        running.served.template = template


def test_a_flood_is_answered_at_once_and_nothing_of_it_stays(running):
    """More answers than may wait: 400 when never, 429 when not now; those that are in go on."""
    before = running.engine.counts["requests"]
    assert ask(running, prompt=["the"] * 17)[1]["error"]["code"] == "too_many_answers"
    assert running.engine.counts["requests"] == before
    step, pause = running.engine._batch.step, threading.Event()
    running.engine._batch.step = lambda: pause.wait(0.01) or step()
    try:
        found = []
        bodies = {"prompt": ["the for"] * 8, "max_tokens": 60, "temperature": 2.0, "seed": 1}
        asking = [threading.Thread(target=lambda: found.append(ask(running, **bodies)[0])) for _ in range(6)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    finally:
        running.engine._batch.step = step
    assert set(found) == {200, 429} and len(found) == 6
    until(lambda: running.engine.state["running"] == running.engine.state["waiting"] == 0)
    assert ask(running, prompt="the", max_tokens=2)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_killed_frees_its_rows(running, stream):
    """The connection is reset, as the system does for a process that was killed."""
    stop, running.served.stop = running.served.stop, ()
    step, pause = running.engine._batch.step, threading.Event()
    running.engine._batch.step = lambda: pause.wait(0.05) or step()  # an answer that takes long
    try:
        body = json.dumps(
            {"model": "tiny", "prompt": ["the for"] * 3, "max_tokens": 240, "temperature": 2.0, "stream": stream}
        ).encode()
        cancelled = running.engine.counts["cancelled"]
        client = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: running.engine.state["running"] == 3)
        client.close()
        until(lambda: running.engine.state["running"] == 0)
        assert running.engine.counts["cancelled"] == cancelled + 3
    finally:
        running.engine._batch.step, running.served.stop = step, stop


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%5c..%5cwindows",
        "/v1/models/../../../etc/passwd",
        "/v1/models/%2fetc%2fpasswd",
        "//etc/passwd",
        "/chat.html",
        "/v1/chat/completions/..",
        "/static/../serve.py",
        "/%00",
    ],
)
def test_path_tricks_get_nothing(running, path):
    """Sent as they stand: a client library would tidy them up."""
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.split()[1] in (b"404", b"400", b"405"), answer[:200]
    assert b"root:" not in answer and b"import" not in answer


@pytest.mark.parametrize("path", ["/", "/health", "/openapi.json", "/metrics", "/v1/models"])
def test_strangers_get_nothing_from_any_address(running, path):
    url = running.url + path
    assert get(url)[0] == 200
    for strange in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        status, text = get(url, **strange)
        assert status == 403 and "error" in json.loads(text), strange


def test_a_foreign_page_may_not_even_ask(running):
    """No answer carries a header that would let another site's page read it."""
    import urllib.request

    with urllib.request.urlopen(f"{running.url}/v1/models", timeout=100) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_neutral_values_of_what_is_not_built_are_taken(running):
    neutral = {
        "echo": False,
        "best_of": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": None,
        "user": "u",
    }
    assert ask(running, prompt="the", max_tokens=2, **neutral)[0] == 200
    chat = {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True, "store": False}
    assert ask(running, "chat/completions", messages=TALK, max_tokens=2, **chat)[0] == 200


TOOLS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}-{% endif %}{% endif %}"
)


def test_a_served_chat_is_the_trained_one(tmp_path):
    """Arguments as clients send them, a text, and names of roles: the same ids as in training. And what a template is told."""
    from tercet.data.chat import Chat
    from tercet.data.formats import chats
    from tercet.data.spans import Template
    from tercet.inference.protocol import ChatRequest, for_template
    from tercet.inference.served import open_served

    served = open_served(save_served(tmp_path / "m", TOOLS_TEMPLATE))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"z": 1, "at": "sky"}'}}
    talk = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "function", "name": "look", "content": "blue"},
        {"role": "assistant", "content": "Because."},
    ]
    asked = ChatRequest.model_validate({"model": "m", "messages": talk[:-1]})
    ids = served.chat_ids(*for_template(asked.messages, asked.tools))
    trained: Chat = chats.read("messages", {"messages": talk}, {})
    (document,) = Template("own", TOOLS_TEMPLATE, served.tokenizer).documents(trained)
    assert ids[0] == served.tokenizer.bos_id  # which training puts in front of a document too
    text = served.tokenizer.backend.decode(ids[1:], skip_special_tokens=False)
    assert '{"name": "look", "arguments": {"z": 1, "at": "sky"}}' in text
    assert document.text.startswith(text) and document.text[len(text) :].startswith("Because.")
    quiet = served.chat_ids(*for_template(asked.messages, None), {"enable_thinking": False})
    assert quiet[: len(ids)] == ids and len(quiet) > len(ids)


def test_a_request_needs_no_model_and_fields_that_change_nothing_are_left_aside(running):
    more = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "max_tokens": 2}
    status, text = get(f"{running.url}/v1/completions", {"prompt": "the", **more})
    assert status == 200 and json.loads(text)["model"] == "tiny"
