"""Encoders beside one another: this process, and helpers for much text.

Looking words up (words.py), rendering chats and finding masks is Python, so threads of one process cannot share it. A
helper is a fresh program, never a fork: the tokenizer has threads of its own, and a process forked after they began
could hang. Nor is it multiprocessing's spawn, which would run the user's main module again. It ends when its input
does, so it never outlives this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tokenizers

from tercet import children
from tercet.data.tokenizer import Tokenizer
from tercet.errors import TercetError

WORTH_CHARACTERS = 2_000_000  # of text for each helper; below, starting one takes longer than it saves
MOST_HELPERS = 2  # reading, checking and writing keep this process busy beside two helpers


class Job(Protocol):
    """Work on a list of texts that any process can do: it can be pickled, and `begin` makes it ready there."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def begin(self) -> Callable[[Sequence[str]], Any]: ...


@dataclass
class TextJob:
    """The job of encoding texts: a list of ids for each."""

    tokenizer: Tokenizer

    def begin(self) -> Callable[[Sequence[str]], list[np.ndarray]]:
        return self.tokenizer.encode


class Encoders:
    """Does a job on batches on several cores; leave the `with` block to end the helpers."""

    def __init__(self, job: Job, characters: int):
        """`characters`: about how much text will come."""
        helpers = min(MOST_HELPERS, (os.cpu_count() or 1) - 1, characters // WORTH_CHARACTERS)
        self._helpers = [_Helper(job) for _ in range(helpers if helpers and job.tokenizer.by_words else 0)]
        waiting: list[Callable[[Sequence[str]], Any]] = [*(h.work for h in self._helpers), job.begin()]
        self.count = len(waiting)
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(self.count, "encoder", lambda: setattr(self._mine, "work", waiting.pop()))

    def submit(self, texts: Sequence[str]) -> Future[Any]:
        return self._pool.submit(lambda: self._mine.work(texts))

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(cancel_futures=True)
        for helper in self._helpers:
            helper.close()


class _Helper:
    """A process that works on what it is sent (see `main`)."""

    def __init__(self, job: Job):
        self._process = subprocess.Popen(
            children.command("tercet.data.encoders"),
            env=children.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._job: Job | None = job

    def work(self, texts: Sequence[str]) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            if self._job is not None:  # here, in a thread: a large tokenizer does not fit into the pipe at once
                _Pickler(process.stdin).dump(self._job)
                self._job = None
            pickle.dump(list(texts), process.stdin)
            process.stdin.flush()
            found = pickle.load(process.stdout)  # of our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            raise TercetError(f"a process that encodes text ended with code {process.wait()}") from None
        if isinstance(found, TercetError):
            raise found
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and something was still to be sent
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class _Pickler(pickle.Pickler):
    """Sends a tokenizer as what encodes alike: without the transformers tokenizer it came from."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tokenizer):
            return _tokenizer, (obj.backend.to_str(), obj.eos_id, obj.bos_id, obj.pad_id)
        return NotImplemented


def _tokenizer(backend: str, eos: int, bos: int | None, pad: int) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(backend), eos, bos, pad)


def main() -> None:
    """Read a job and then lists of texts; answer each with what the job makes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        work = pickle.load(source).begin()
        while True:
            texts = pickle.load(source)
            try:
                answer: Any = work(texts)
            except TercetError as error:
                answer = error
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent is done, or gone: nobody reads what is still buffered


if __name__ == "__main__":
    # As the module's own name: what was pickled by the parent is then of the classes that are here.
    from tercet.data import encoders

    encoders.main()
