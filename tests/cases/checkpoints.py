"""A stand-in engine for tests of publishing, retention and full disks: writes one small file a rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tercet.engine.shards import Save, SavedFile
from tercet.parallel.world import World
from tercet.spec.run_folder import RunFolder
from tercet.training.checkpoint import Checkpoints
from tercet.training.disk import Disk

ALONE = World(0, 1, 0, torch.device("cpu"))


class SmallEngine:
    def __init__(self, rank: int = 0, delays: bool = False, background: bool = False):
        self.background = background
        self.rank, self.value = rank, torch.arange(64, dtype=torch.float32).view(8, 8)
        self._random = random.Random(rank) if delays else None

    def save(self, folder: Path) -> Save:
        if self._random:
            time.sleep(self._random.random() * 0.004)
        position = {"steps_done": 0, "updates": 0}
        part = SavedFile(folder / f"rank-{self.rank}.safetensors", {"weights/w": self.value}, {"w": 0})
        save = Save(lambda: [part], position, self.background)
        if self._random:
            time.sleep(self._random.random() * 0.004)
        return save


class Said:
    """Stands for rank 0's recorder: keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, int]] = []

    def warn(self, text: str) -> None:
        self.lines.append(text)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append((kind, step))

    def flush(self) -> None:
        pass


def checkpoints(
    folder: Path,
    world: World = ALONE,
    keep: int = 2,
    disk_full: str = "stop",
    say: Callable[[str], Any] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    record: Any = None,
) -> Checkpoints:
    run = RunFolder(folder)
    return Checkpoints(run, world, Disk(run, world, disk_full, say, stop), keep, 1000, record)


def state(step: int, loss: float | None = None) -> dict[str, Any]:
    return {"step": step, "validation_loss": loss, "ranks": 1}
