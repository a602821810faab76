"""Encoders beside one another: this process, and helpers for a large text.

Looking words up (words.py) is Python, so threads of one process cannot share it. A helper is a fresh program, never a
fork: the tokenizer has threads of its own, and a process forked after they began could hang. Nor is it
multiprocessing's spawn, which would run the user's main module again. It ends when its input does, so it never
outlives this process.
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
from typing import Any

import numpy as np
import tokenizers

from tercet import children
from tercet.data.tokenizer import Tokenizer
from tercet.errors import TercetError

WORTH_CHARACTERS = 2_000_000  # of text for each helper; below, starting one takes longer than it saves
MOST_HELPERS = 2  # reading, checking and writing keep this process busy beside two helpers

Encode = Callable[[Sequence[str]], list[np.ndarray]]


class Encoders:
    """Encodes batches on several cores; leave the `with` block to end the helpers."""

    def __init__(self, tokenizer: Tokenizer, characters: int):
        """`characters`: about how much text will come."""
        helpers = min(MOST_HELPERS, (os.cpu_count() or 1) - 1, characters // WORTH_CHARACTERS)
        self._helpers = [_Helper(tokenizer) for _ in range(helpers if helpers and tokenizer.by_words else 0)]
        waiting: list[Encode] = [*(h.encode for h in self._helpers), tokenizer.encode]
        self.count = len(waiting)
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(self.count, "encoder", lambda: setattr(self._mine, "encode", waiting.pop()))

    def submit(self, texts: Sequence[str]) -> Future[list[np.ndarray]]:
        return self._pool.submit(lambda: self._mine.encode(texts))

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(cancel_futures=True)
        for helper in self._helpers:
            helper.close()


class _Helper:
    """A process that encodes what it is sent (see `main`)."""

    def __init__(self, tokenizer: Tokenizer):
        self._process = subprocess.Popen(
            children.command("tercet.data.encoders"),
            env=children.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._start: Any = (tokenizer.backend.to_str(), tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            if self._start is not None:  # here, in a thread: a large tokenizer does not fit into the pipe at once
                pickle.dump(self._start, process.stdin)
                self._start = None
            pickle.dump(list(texts), process.stdin)
            process.stdin.flush()
            found = pickle.load(process.stdout)  # of our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            raise TercetError(f"a process that encodes text ended with code {process.wait()}") from None
        if isinstance(found, TercetError):
            raise found
        ids, ends = found
        return np.split(ids, ends)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and something was still to be sent
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def main() -> None:
    """Read (tokenizer, eos, bos, pad) and then lists of texts; answer each with (ids of all, where to split)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        backend, eos, bos, pad = pickle.load(source)
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend), eos, bos, pad)
        while True:
            texts = pickle.load(source)
            try:
                found = tokenizer.encode(texts)
                answer: Any = (np.concatenate(found), np.cumsum([len(ids) for ids in found])[:-1])
            except TercetError as error:
                answer = error
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent is done, or gone: nobody reads what is still buffered


if __name__ == "__main__":
    main()
