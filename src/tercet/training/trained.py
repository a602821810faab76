"""RUN/model or RUN/adapter: what was trained as a Hugging Face folder, written by rank 0 while all ranks gather the tensors."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from tercet.engine import Engine
from tercet.errors import InterruptedRun
from tercet.parallel.world import World
from tercet.training.disk import Problem, problem_of, publish


class TrainedModel:
    """Writes `target` under a temporary name until it is whole. Every rank has one and calls the same methods.

    `save(folder, tensors)` writes the folder on rank 0; tensors are gathered one by one as it asks for them.
    """

    def __init__(
        self,
        target: Path,
        world: World,
        engine: Engine,
        save: Callable[[Path, Iterator[tuple[str, Tensor]]], None],
        stop_requested: Callable[[], bool],
    ):
        self._target, self._world, self._engine = target, world, engine
        self._save, self._stop_requested = save, stop_requested

    def attempt(self, number: int) -> Problem | None:
        """Write it and return what went wrong; raises InterruptedRun when any rank was asked to stop."""
        if self._world.rank > 0:
            return self._follow()
        problem = None
        try:
            self._write()
        except InterruptedRun:
            raise
        except Exception as error:
            traceback.print_exc()  # into this rank's log
            problem = problem_of(error, 0)
        self._world.meet((problem, False))
        return problem

    def _write(self) -> None:
        temporary = self._target.with_name(f".{self._target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._save(temporary, self._gathered())
        for file in temporary.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        publish(temporary, self._target)

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        self._look_for_stop(self._world.meet((None, self._stop_requested())))  # all before the first tensor went well
        for named in self._engine.weights():
            yield named
            # Rank 0 may have written gigabytes in between: the others wait here, not in the next gathering.
            self._look_for_stop(self._world.meet((None, self._stop_requested())))

    def _follow(self) -> Problem | None:
        """Take part in the gathering until rank 0 has published the folder, or says what stopped it."""
        tensors = iter(self._engine.weights())
        while True:
            outcomes = self._world.meet((None, self._stop_requested()))
            if outcomes[0][0] is not None:
                return outcomes[0][0]
            self._look_for_stop(outcomes)
            if next(tensors, None) is None:
                break
        return self._world.meet((None, False))[0][0]

    def _look_for_stop(self, outcomes: list[tuple[Problem | None, bool]]) -> None:
        if any(stop for _, stop in outcomes):
            raise InterruptedRun(
                f"stopped on request after the last step; saved, but RUN/{self._target.name} is not written yet"
            )
