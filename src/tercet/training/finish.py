"""After the last step: the trained model's folder, then the summary, which says that nothing is left to do."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
from torch import Tensor

from tercet import __version__
from tercet.data.kept import TOKENIZER
from tercet.parallel.world import World
from tercet.spec.families.where import locate
from tercet.spec.recipe import Recipe
from tercet.spec.run_folder import FORMAT, RunFolder
from tercet.training.assembly import Assembled
from tercet.training.disk import Disk, agreed
from tercet.training.loop import Loop, peak_bytes
from tercet.training.record import Recorder, write_json
from tercet.training.trained import TrainedModel
from tercet.weights.adapters import save_adapter
from tercet.weights.reading import DTYPES
from tercet.weights.writing import save_folder


def model_dtype(recipe: Recipe) -> str:
    return recipe.output.model_dtype or ("fp32" if recipe.train.precision == "fp32" else "bf16")


def write_model(built: Assembled, disk: Disk, stopped: Callable[[], bool]) -> None:
    """Write RUN/model, or of an adapter RUN/adapter, tensor by tensor through rank 0."""
    if built.spec.adapter is not None:
        _write_adapter(built, disk, stopped)
        return
    recipe, prepared, spec = built.recipe, built.prepared, built.spec
    dtype = DTYPES[model_dtype(recipe)]
    ids = {"eos": prepared.stop_ids[-1], "bos": prepared.bos_id, "pad": prepared.pad_id}

    def save(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        save_folder(
            folder,
            spec,
            tensors,
            dtype,
            _own_tokenizer(built),
            ids,
            source=locate(recipe.model.path) if recipe.model.path else None,
            new_tokenizer=recipe.data.tokenizer != "model",
        )

    model = TrainedModel(built.run.model, built.world, built.engine, save, stopped)
    disk.write("the trained model", spec.parameters * dtype.itemsize, model.attempt)


def _own_tokenizer(built: Assembled) -> Path:
    """Return the run's own copy: the cache's may be gone when the run ends."""
    own = built.run.path / TOKENIZER
    return own if own.is_dir() else built.prepared.tokenizer_folder


def _write_adapter(built: Assembled, disk: Disk, stopped: Callable[[], bool]) -> None:
    base, spec = built.recipe.model.path, built.spec
    assert base is not None

    def save(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        save_adapter(folder, spec, tensors, base, _own_tokenizer(built))

    adapter = TrainedModel(built.run.adapter, built.world, built.engine, save, stopped)
    disk.write("the trained adapter", 4 * spec.trained_parameters, adapter.attempt)


def summarise(built: Assembled, disk: Disk, loop: Loop, record: Recorder | None, seconds: float) -> None:
    """Say that the run is finished: nothing of it is left to do."""
    run, world = built.run, built.world
    memory = world.meet((peak_bytes(world.device), built.engine.memory()))

    def write() -> None:
        assert record is not None
        record.flush()
        content = _summary(run, world, memory, loop, seconds)
        write_json(run.summary, content)
        record.event("end", **{k: content[k] for k in ("train_loss", "validation_loss")}, step=loop.progress.step)

    disk.write("summary.json", 0, lambda _: agreed(world, write, only=0)[1])


def _summary(run: RunFolder, world: World, memory: list[Any], loop: Loop, seconds: float) -> dict[str, Any]:
    p = loop.progress
    rows = run.read_events()
    begun = max((n for n, row in enumerate(rows) if row["event"] == "start"), default=0)
    steps, here = _timed(rows), _timed(rows[begun:])
    here = here or steps  # of this start of the run: an earlier one may have had other ranks, as its plan did
    timed = here[len(here) // 10 :]  # the first tenth warms up
    spent = sum(row["seconds"] for row in timed)
    summary = {
        "format": FORMAT,
        "finished": True,
        "steps": p.step,
        "tokens": p.tokens,
        "train_loss": p.train_loss,
        "validation_loss": p.validation_loss,
        "tokens_per_second": sum(row["tokens"] for row in timed) / spent if spent else None,
        "step_seconds": spent / len(timed) if timed else None,
        "seconds": seconds,
        "ranks": world.size,
        "device": world.device.type,
        "peak_bytes_per_rank": _peaks([peak for peak, _ in memory], steps),
        "memory": {moment: [m[moment] for _, m in memory] for moment in ("between_steps", "peak")},
        "failed": [f"step {step}: {what}" for step, what in loop.failed],
        "versions": versions(),
    }
    return summary


def _timed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = (row for row in rows if row["event"] == "step")
    return [row for row in steps if isinstance(row.get("seconds"), float) and isinstance(row.get("tokens"), int)]


def _peaks(of_this_start: list[int], steps: list[dict[str, Any]]) -> list[int]:
    """Return the most that each rank has held; rank 0's in earlier starts of the run too, which its steps tell."""
    earlier = [row["memory_bytes"] for row in steps if isinstance(row.get("memory_bytes"), int)]
    return [max(of_this_start[:1] + earlier), *of_this_start[1:]]


def versions() -> dict[str, str]:
    return {
        "tercet": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
    }
