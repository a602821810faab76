"""One thread that computes, many that ask: answers for a server, side by side, each with a queue of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tercet.inference.batch import Batch, Running
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served
from tercet.inference.text import TextStream


@dataclass(frozen=True)
class Delta:
    """A token's contribution: text that became certain, the token, its log-probability and the best ones beside it."""

    text: str
    token: int | None = None
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()
    finish: str | None = None


@dataclass(eq=False)
class Generation:
    ids: tuple[int, ...]
    limit: int
    sampling: Sampling
    stops: tuple[str, ...]
    best: int  # log-probabilities of so many tokens are wanted; -1: none
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    left: bool = False  # the client has gone
    running: Running | None = None
    shown: TextStream | None = None

    def send(self, piece: Delta | Exception) -> None:
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # the loop has ended; nobody listens
            self.left = True


class QueueFull(Exception):
    """More requests wait than the server takes."""


class Engine:
    """`rows` texts at a time, `queue` waiting ones. Use as a context: the thread ends with it."""

    def __init__(self, served: Served, rows: int = 8, queue: int = 64, capacity: int | None = None):
        self.served, self.most_waiting = served, queue
        self._batch = Batch(served.model, rows, capacity, served.vocabulary)
        self._waiting: deque[Generation] = deque()
        self._going: list[Generation] = []
        self._change = threading.Condition()
        self._ended = False
        self.counts: dict[str, float] = dict.fromkeys(
            ("requests", "refused", "cancelled", "tokens", "prompt_tokens", "reused_tokens", "seconds"), 0
        )
        self._thread = threading.Thread(target=self._run, name="tercet-engine", daemon=True)

    @property
    def capacity(self) -> int:
        return self._batch.capacity

    @property
    def state(self) -> dict[str, int]:
        return {"running": len(self._going), "waiting": len(self._waiting), "rows": self._batch.rows}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify()
        self._thread.join()

    def takes(self, count: int) -> bool:
        """Return whether so many answers more may wait; those that may not are counted as refused."""
        with self._change:
            takes = sum(not other.left for other in self._waiting) + count <= self.most_waiting
            self.counts["refused"] += 0 if takes else 1
            return takes

    async def answer(
        self, ids: Sequence[int], limit: int, sampling: Sampling, stops: Sequence[str] = (), best: int = -1
    ) -> AsyncIterator[Delta]:
        """Yield an answer's pieces; the last one has `finish`. Leaving early frees its row. Raises QueueFull."""
        asked = Generation(tuple(ids), limit, sampling, tuple(stops), best, asyncio.get_running_loop())
        with self._change:
            if not self.takes(1):
                raise QueueFull
            self.counts["requests"] += 1
            self._waiting.append(asked)
            self._change.notify()
        try:
            while True:
                piece = await asked.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            asked.left = True

    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._waiting or self._going or self._ended):
                    self._change.wait()
                if self._ended:
                    return
                self._admit()
            begin = time.monotonic()
            try:
                got = self._batch.step()
            except Exception as error:  # whoever waits must hear of it, or waits for ever
                self._fail(error)
                continue
            self.counts["seconds"] += time.monotonic() - begin
            for asked in list(self._going):
                try:
                    self._after(asked, asked.running in got)
                except Exception as error:
                    self._drop(asked, error)

    def _admit(self) -> None:
        while self._waiting and self._batch.has_room:
            asked = self._waiting.popleft()
            if asked.left:
                self.counts["cancelled"] += 1
                continue
            try:
                asked.shown = TextStream(self.served.decode, asked.ids, asked.stops)
                asked.running = self._batch.add(asked.ids, asked.limit, asked.sampling, self.served.stop)
            except Exception as error:  # this one alone; the engine goes on
                asked.send(error)
                continue
            self.counts["prompt_tokens"] += len(asked.ids)
            self.counts["reused_tokens"] += asked.running.reused
            self._going.append(asked)

    def _after(self, asked: Generation, got: bool) -> None:
        """Send what a step brought; let the text go when it ended or nobody listens."""
        text, shown = asked.running, asked.shown
        assert text is not None and shown is not None
        left = asked.left  # once: it may change meanwhile
        if left:
            self.counts["cancelled"] += 1
        elif got and not text.ended:
            self.counts["tokens"] += 1
            asked.send(self._piece(asked, text, shown.push(text.new[-1])))
        if left or text.done or shown.stopped:
            asked.send(Delta(shown.finish(), finish="stop" if text.ended or shown.stopped else "length"))
            self._batch.remove(text)
            self._going.remove(asked)

    def _drop(self, asked: Generation, error: Exception) -> None:
        """End one text by an error; the others go on."""
        asked.send(error)
        if asked.running in self._batch.texts:
            self._batch.remove(asked.running)
        if asked in self._going:
            self._going.remove(asked)

    def _piece(self, asked: Generation, text: Running, shown: str) -> Delta:
        token = text.new[-1]
        if asked.best < 0 or (logprobs := text.logprobs) is None:
            return Delta(shown, token)
        values, ids = torch.topk(logprobs, min(asked.best, len(logprobs))) if asked.best else ((), ())
        pairs = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
        return Delta(shown, token, float(logprobs[token]), pairs)

    def _fail(self, error: Exception) -> None:
        for asked in self._going:
            asked.send(error)
        self._going = []
        self._batch.texts.clear()

    def metrics(self) -> dict[str, Any]:
        return {**self.counts, **self.state, "prefix_bytes": self._batch.prefixes.nbytes}
