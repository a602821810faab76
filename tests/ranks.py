"""A pool of gloo ranks that lives as long as the test session: starting processes costs more than most tests.

`Ranks(n).run(function, *args)` calls `function(world, *args)` on every rank and returns the results in rank order.
A hard time limit ends the pool; the next call starts a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 60
STARTING_SECONDS = 240  # more, for the first answer: processes import torch, perhaps while other work shares the cores


class RankError(AssertionError):
    pass


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch

    from tercet.parallel.world import open_world

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    world = open_world(LIMIT_SECONDS, store)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    def __init__(self, size: int):
        self.size = size
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS) -> list[Any]:
        if not self._processes:
            self._start()
            limit += STARTING_SECONDS
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit):
                self.stop()
                raise RankError(f"rank {rank} did not answer within {limit} s")
            try:
                good, value = pipe.recv()
            except EOFError:
                self.stop()
                raise RankError(f"rank {rank} ended") from None
            if not good:
                self.stop()  # the others may be in the middle of a collective
                raise RankError(f"rank {rank}:\n{value}")
            results.append(value)
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
