"""The real loop around a small engine, its batches dealt by hand; what it records lands in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.spec.run_folder import RunFolder
from tercet.training.loop import Loop, Progress
from tercet.training.record import Recorder
from tests.tiny import TinyBatch, micro_batches


class Dealt:
    """Batches of `rows` rows by tests.tiny.micro_batches; nothing is held out."""

    def __init__(self, rows: int):
        self.rows = rows

    def micro_batches(self, step: int, *, rank: int, ranks: int, micro_batch: int) -> list[TinyBatch]:
        return micro_batches(step, rank, ranks, micro_batch, self.rows)

    def evaluation(self, **share: int) -> Any:
        raise AssertionError("nothing is held out")


def loop_of(
    world: World,
    engine: Any,
    batches: Any,
    steps: int,
    *,
    micro_batch: int = 1,
    record: Recorder | None = None,
    optim: OptimSection | None = None,
    **train: Any,
) -> Loop:
    return Loop(
        engine,
        batches,
        world,
        None,
        record,
        TrainSection(**train),
        optim or OptimSection(lr=1e-2, schedule="constant"),
        total_steps=steps,
        micro_batch=micro_batch,
        checkpoint_every=0,
        progress=Progress(),
        stop_requested=lambda: False,
        state={},
        has_validation=False,
    )


def recorder_of(world: World, folder: Path, steps: int, console: Any = None) -> Recorder | None:
    """Rank 0's recorder into `folder`, None on the others, as in a run."""
    return Recorder(RunFolder(folder), steps, console) if world.rank == 0 else None
