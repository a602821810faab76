"""A server that speaks OpenAI's protocol: one model, continuous batching, streams; and a page to chat at /."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tercet.errors import InputError
from tercet.inference.engine import Delta, Engine, QueueFull
from tercet.inference.openapi import description
from tercet.inference.protocol import ChatRequest, CompletionRequest, Refused, Request, for_template, read_request

MOST_BODY_BYTES = 4 * 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server:
    """The application over an engine. `key`: what clients must send; `hosts`: names it answers to, None for all."""

    def __init__(self, engine: Engine, key: str | None = None, hosts: tuple[str, ...] | None = LOOPBACK):
        self.engine, self.served, self._key, self._hosts = engine, engine.served, key, hosts
        self._since = int(time.time())
        routes = [
            Route("/", self._guarded(self._page, key=False)),
            Route("/health", self._guarded(self._health, key=False)),
            Route("/openapi.json", self._guarded(self._description, key=False)),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failed})

    def _guarded(self, answer: Any, key: bool = True) -> Any:
        """Return the answer behind the checks; `key`: whether a key is needed where one is set."""

        async def guarded(request: HttpRequest) -> Response:
            try:
                self._check(request, key)
                return await answer(request)
            except Refused as refused:
                return JSONResponse(refused.body(), refused.status)
            except InputError as error:
                return JSONResponse(Refused(400, error.message, "invalid_value").body(), 400)
            except QueueFull:
                full = Refused(429, "more requests wait than this server takes; try again later", "queue_full")
                return JSONResponse(full.body(), 429, {"Retry-After": "5"})
            except Exception as error:  # answered here: one that left the application would break the connection
                print(f"{request.method} {request.url.path}: {type(error).__name__}: {error}", file=sys.stderr)
                return await _failed(request, error)

        return guarded

    def _check(self, request: HttpRequest, key: bool) -> None:
        """Refuse pages of other sites (also behind a name that was turned to this machine), and a wrong key."""
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        origin = request.headers.get("origin")
        if self._hosts is not None and host not in self._hosts:
            raise Refused(403, f"this server does not answer to the name {host!r}", "foreign_host")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise Refused(403, f"pages of {origin} may not use this server", "foreign_origin")
        if key and self._key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                raise Refused(401, "a right API key is needed: Authorization: Bearer …", "invalid_api_key")

    # ------------------------------------------------------------------------------------------ small answers

    async def _page(self, request: HttpRequest) -> Response:
        return HTMLResponse((resources.files("tercet") / "inference" / "chat.html").read_text(encoding="utf-8"))

    async def _health(self, request: HttpRequest) -> Response:
        alive = self.engine.alive
        status = "ok" if alive else "the engine has ended"
        return JSONResponse({"status": status, **self.engine.state}, status_code=200 if alive else 503)

    async def _description(self, request: HttpRequest) -> Response:
        return JSONResponse(description())

    async def _metrics(self, request: HttpRequest) -> Response:
        lines = [f"tercet_{name} {value}" for name, value in self.engine.metrics().items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    def _entry(self) -> dict[str, Any]:
        chats = self.served.template is not None
        return {"id": self.served.name, "object": "model", "created": self._since, "owned_by": "tercet", "chats": chats}

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._known(request.path_params["name"])
        return JSONResponse(self._entry())

    def _known(self, name: str | None) -> None:
        if name not in (None, self.served.name):
            raise Refused(
                404, f"no model {str(name)[:80]!r} here; it is {self.served.name!r}", "model_not_found", "model"
            )

    # ------------------------------------------------------------------------------------------------ answers

    async def _read(self, request: HttpRequest, kind: type[Request]) -> Any:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise Refused(413, f"the request is longer than {MOST_BODY_BYTES} bytes", "too_large")
        asked = read_request(kind, body)
        self._known(asked.model)
        return asked

    async def _chat(self, request: HttpRequest) -> Response:
        asked = await self._read(request, ChatRequest)
        self._take(asked.n)
        messages, tools = for_template(asked.messages, asked.tools)
        ids = await asyncio.to_thread(self.served.chat_ids, messages, tools, asked.chat_template_kwargs)
        return await self._answer(request, asked, [ids], chat=True)

    async def _complete(self, request: HttpRequest) -> Response:
        asked = await self._read(request, CompletionRequest)
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        self._take(len(prompts) * asked.n)
        ids = await asyncio.to_thread(lambda: [self.served.prompt_ids(p) for p in prompts])
        return await self._answer(request, asked, ids, chat=False)

    def _take(self, count: int) -> None:
        """Refuse more answers than may ever wait (400) or may wait now (429), before anything is computed for them."""
        most = self.engine.most_waiting
        if count > max(most, 1):
            words = f"the request asks for {count} answers (prompts times n); this server takes {most} at once"
            raise Refused(400, words, "too_many_answers", "n")
        if not self.engine.takes(count):
            raise QueueFull

    async def _answer(self, request: HttpRequest, asked: Any, prompts: list[list[int]], chat: bool) -> Response:
        for ids in prompts:
            if not 0 < len(ids) < self.engine.capacity:
                words = f"the prompt has {len(ids)} tokens; 1 to {self.engine.capacity - 1} are taken"
                raise Refused(400, words, "context_length_exceeded", "messages" if chat else "prompt")
        reply = Reply(self.served.name, chat, asked, sum(map(len, prompts)), self.served)
        streams = []
        for ids in prompts:
            for number in range(asked.n):
                how = asked.sampling(self.served.suggested, number)
                limit = asked.limit or self.engine.capacity
                streams.append(self.engine.answer(ids, limit, how, asked.stops, asked.best))
        if asked.stream:
            first = await anext(merged := _merge(streams))  # a full queue is told by status, before anything is sent
            return StreamingResponse(reply.events(first, merged), media_type="text/event-stream")
        collecting = asyncio.ensure_future(reply.whole(_merge(streams)))
        leaving = asyncio.ensure_future(_client_leaves(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(collecting.result()) if collecting.done() else Response(status_code=499)
        finally:
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)


async def _client_leaves(request: HttpRequest) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


async def _merge(streams: list[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield (number of the stream, piece) as they come; closing it closes them all."""
    pending = {asyncio.ensure_future(anext(s)): n for n, s in enumerate(streams)}  # type: ignore[arg-type]
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                n = pending.pop(task)
                piece = task.result()
                if piece.finish is None:
                    pending[asyncio.ensure_future(anext(streams[n]))] = n  # type: ignore[arg-type]
                yield n, piece
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]


class Reply:
    """The protocol's words around pieces."""

    def __init__(self, model: str, chat: bool, asked: Any, prompt_tokens: int, served: Any):
        self._chat, self._asked, self._served = chat, asked, served
        kind = "chat.completion" if chat else "text_completion"
        self._chunk = "chat.completion.chunk" if chat else kind
        word = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{word}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self._prompt_tokens, self._tokens = prompt_tokens, 0
        self._bytes: dict[int, bytearray] = {}  # what each choice's tokens have said so far

    async def whole(self, pieces: AsyncIterator[tuple[int, Delta]]) -> dict[str, Any]:
        texts: dict[int, list[Delta]] = {}
        async for n, piece in pieces:
            texts.setdefault(n, []).append(piece)
        choices = []
        for n, found in sorted(texts.items()):
            tokens = [p for p in found if p.token is not None]
            self._tokens += len(tokens)
            text = "".join(p.text for p in found)
            own = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(
                {"index": n, **own, "logprobs": self._logprobs(n, tokens), "finish_reason": found[-1].finish}
            )
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, first: tuple[int, Delta], rest: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[str]:
        begun: set[int] = set()
        try:
            yield self._event(*first, begun)
            async for n, piece in rest:
                yield self._event(n, piece, begun)
            if self._asked.wants_usage:
                yield _data({**self._head, "object": self._chunk, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            await rest.aclose()  # type: ignore[attr-defined]

    def _event(self, n: int, piece: Delta, begun: set[int]) -> str:
        tokens = [piece] if piece.token is not None else []
        self._tokens += len(tokens)
        own: dict[str, Any] = {"text": piece.text}
        if self._chat:
            own = {"delta": {**({} if n in begun else {"role": "assistant"}), "content": piece.text}}
        begun.add(n)
        choice = {"index": n, **own, "logprobs": self._logprobs(n, tokens), "finish_reason": piece.finish}
        return _data({**self._head, "object": self._chunk, "choices": [choice]})

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
        }

    def _logprobs(self, n: int, pieces: list[Delta]) -> dict[str, Any] | None:
        """Return the log probabilities of choice `n`'s next tokens. A part of a character is spelled bytes:\\xe2."""
        if self._asked.best < 0:
            return None
        if self._chat:
            return {"content": [self._entry(p) for p in pieces]}
        before = self._bytes.setdefault(n, bytearray())
        offsets = []
        for piece in pieces:
            offsets.append(len(before.decode(errors="ignore")))  # in the text of this answer
            before += self._bytes_of(piece.token)
        return {
            "tokens": [self._spell(p.token) for p in pieces],
            "token_logprobs": [p.logprob for p in pieces],
            "top_logprobs": [{self._spell(i): v for i, v in p.best} for p in pieces],
            "text_offset": offsets,
        }

    def _entry(self, piece: Delta) -> dict[str, Any]:
        def one(i: int | None, value: float | None) -> dict[str, Any]:
            return {"token": self._spell(i), "logprob": value, "bytes": list(self._bytes_of(i))}

        return {**one(piece.token, piece.logprob), "top_logprobs": [one(i, v) for i, v in piece.best]}

    def _bytes_of(self, token: int | None) -> bytes:
        assert token is not None
        return self._served.tokenizer.bytes_of(token)

    def _spell(self, token: int | None) -> str:
        found = self._bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}", "no_such_address")
    return JSONResponse(refused.body(), error.status_code)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(Refused(500, "the server failed at this request", "internal_error").body(), 500)
