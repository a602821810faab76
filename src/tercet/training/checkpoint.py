"""Checkpoints: when and where. Atomic publish with a manifest, keep the last k and the best.

A folder `checkpoints/step-000100/` exists only when it is complete: it is written under a temporary name and
renamed, by rank 0 alone, after every rank has finished. `manifest.json` (sizes and hashes) is written last. What
belongs to that step but is known only after the save, the validation loss, is added as `after.json`.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercet.engine import Engine, SaveHandle
from tercet.engine.shards import file_hash
from tercet.errors import InputError
from tercet.parallel.world import World
from tercet.spec.run_folder import AFTER, MANIFEST, STATE, RunFolder, read_after, read_state, state_bytes
from tercet.training.disk import Disk, Problem, agreed, publish, sync_folder, write_synced
from tercet.training.record import Recorder

FORMAT = 1
ALONE = World(0, 1, 0, torch.device("cpu"))


@dataclass(frozen=True)
class FoundCheckpoint:
    folder: Path
    state: dict[str, Any]
    skipped: list[str]  # newer ones that were not complete, each with the reason
    damaged: list[Path]  # the same ones' folders


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every published checkpoint, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(p.name[5:]), p) for p in checkpoints.iterdir() if p.name.startswith("step-") and p.name[5:].isdigit()]
    return sorted(found, reverse=True)


def fault_of(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Return what is wrong with a checkpoint (which file and how), or None when it is complete and undamaged.

    Each of several ranks reads its share of the files; a fault that one of them finds is the checkpoint's.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        entries = [
            (folder / name, int(entry["bytes"]), str(entry["blake2b"]))
            for name, entry in sorted(json.loads(manifest.read_bytes())["files"].items())
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} is damaged"
    if folder / STATE not in [path for path, *_ in entries] or any(path.parent != folder for path, *_ in entries):
        return f"{manifest} is damaged: it lists no {STATE}, or files of another folder"
    for path, size, _ in entries:
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, the manifest says {size}"
    try:
        for path, _, wanted in entries[rank::ranks]:
            if file_hash(path) != wanted:
                return f"{path} is damaged: its content does not match the manifest's hash"
        read_state(folder)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror}"
    except InputError as error:
        return error.message
    return None


def find_checkpoint(checkpoints: Path, world: World = ALONE) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint, or None when none was ever published; the ranks share the reading.

    Raises InputError, on all ranks, naming the files when there are some but every one is damaged.
    """
    skipped: list[str] = []
    damaged: list[Path] = []
    for _, folder in world.meet(steps_in(checkpoints))[0]:
        faults = [fault for fault in world.meet(fault_of(folder, world.rank, world.size)) if fault is not None]
        if not faults:
            return FoundCheckpoint(folder, world.meet(read_state(folder))[0], skipped, damaged)
        skipped.append(faults[0])
        damaged.append(folder)
    if skipped:
        raise InputError(
            "no checkpoint is complete: " + "; ".join(skipped),
            "Restore the file from a copy, or remove the checkpoints folder to begin again from step 0.",
        )
    return None


@dataclass
class Pending:
    """A save that is not published yet."""

    state: dict[str, Any]
    folder: Path
    handle: SaveHandle | None = None
    background: bool = False  # on any rank: all then go on with the next steps
    waited_seconds: float = 0.0  # that training stood still for it

    @property
    def what(self) -> str:
        return f"the checkpoint of step {self.state['step']}"


class Checkpoints:
    """Every rank has one and calls the same methods at the same steps. `record` is rank 0's, None on the others."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        disk: Disk,
        keep: int,
        needed_bytes: int,
        record: Recorder | None = None,
        last_step: int = -1,
    ):
        """`last_step`: the newest published one, which a run resumes."""
        self._run, self._world, self._disk, self._keep = run, world, disk, keep
        self._needed_bytes, self._record = needed_bytes, record
        self._pending: Pending | None = None
        self.last_step = last_step

    def save(self, engine: Engine, state: dict[str, Any]) -> None:
        """Write a checkpoint of `state["step"]`. It is published when this returns, or behind the next steps: then
        finish() does it, once writing() is False on all ranks.

        A full disk never touches an earlier checkpoint: what was begun is removed, then the run waits for space
        or stops, by output.disk_full. Raises RunError when it stops.
        """
        self.finish()
        save = Pending(state, self._run.checkpoints / f".step-{state['step']:06d}.tmp")
        with _clock(save):
            self._disk.write(save.what, self._needed_bytes, lambda _: self._begin(save, engine))
        if save.background:
            self._pending = save
        else:
            self._published(save)

    def writing(self) -> bool:
        """Return whether this rank still writes. Ranks compare their answers at the same step, then finish()."""
        handle = self._pending.handle if self._pending else None
        return handle is not None and not handle.done()

    def finish(self) -> None:
        """Wait until the pending save, if there is one, is written everywhere, and publish it."""
        if self._pending is None:
            return
        save, self._pending = self._pending, None
        with _clock(save):
            self._disk.write(
                save.what,
                self._needed_bytes,
                lambda number: self._write_again(save) if number else self._complete(save),
                begun=True,
            )
        self._published(save)

    def amend(self, step: int, **known: Any) -> None:
        """Add to the checkpoint of `step`, if it is the newest, what is known since it was saved."""
        if self._pending is not None and self._pending.state["step"] == step:
            self._pending.state.update(known)
        elif self.last_step == step:
            _, problem = agreed(self._world, lambda: self._write_after(step, known), only=0)
            self._say_problem(f"{AFTER} of step {step} could not be written", problem)

    # ------------------------------------------------------------------------------------------------- one save

    def _begin(self, save: Pending, engine: Engine) -> Problem | None:
        """Write, or have it written behind the next steps; return what failed on any rank."""

        def begin() -> bool:
            save.handle = engine.save(save.folder)
            return save.handle.background

        return self._make_folder(save) or self._written(save, begin)

    def _write_again(self, save: Pending) -> Problem | None:
        def again() -> bool:
            assert save.handle is not None
            save.handle.again()
            return False  # no step until it is published

        return self._make_folder(save) or self._written(save, again)

    def _written(self, save: Pending, begin: Callable[[], bool]) -> Problem | None:
        background, problem = agreed(self._world, begin)
        save.background = any(background)
        if problem is not None:  # ranks that did begin end before what they wrote is removed
            with suppress(Exception):
                if save.handle is not None:
                    save.handle.wait()
            self._world.meet()
            return problem
        return None if save.background else self._complete(save)

    def _complete(self, save: Pending) -> Problem | None:
        assert save.handle is not None
        files, problem = agreed(self._world, save.handle.wait)
        if problem is None:
            merged = {name: entry for part in files for name, entry in part.items()}
            _, problem = agreed(self._world, lambda: self._publish(save.folder, merged, save.state), only=0)
        return problem

    def _make_folder(self, save: Pending) -> Problem | None:
        def make() -> None:
            if not self._run.checkpoints.is_dir():
                self._run.checkpoints.mkdir(parents=True)
                sync_folder(self._run.path)
            save.folder.mkdir()

        return agreed(self._world, make, only=0)[1]

    def _publish(self, temporary: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
        """What is said to be saved is on the disk: files, then the folder, then its name, and events up to here."""
        if self._record is not None:
            self._record.flush()
        state_file = temporary / STATE
        write_synced(state_file, state_bytes(state))
        files = {**files, STATE: {"bytes": state_file.stat().st_size, "blake2b": file_hash(state_file)}}
        write_synced(temporary / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=2).encode())
        publish(temporary, self._run.checkpoint_of(state["step"]))

    def _published(self, save: Pending) -> None:
        self.last_step = save.state["step"]
        if self._record is not None:
            self._record.event("checkpoint", step=self.last_step, seconds=save.waited_seconds)
        _, problem = agreed(self._world, self._prune, only=0)
        self._say_problem("an older checkpoint could not be removed", problem)

    # ------------------------------------------------------------------------------------------ what stays

    def _write_after(self, step: int, known: dict[str, Any]) -> None:
        folder = self._run.checkpoint_of(step)
        temporary = folder / f".{AFTER}.tmp"
        write_synced(temporary, state_bytes({**read_after(folder), **known}))
        temporary.replace(folder / AFTER)
        sync_folder(folder)
        self._prune()

    def _prune(self) -> None:
        """Remove what is neither among the last k nor the best; only after the new one stands."""
        steps = [(step, folder) for step, folder in steps_in(self._run.checkpoints) if step <= self.last_step]
        kept = {folder for _, folder in steps[: self._keep]} | {best_checkpoint(self._run.checkpoints)}
        for _, folder in steps:
            if folder not in kept:
                # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under its name.
                doomed = folder.with_name(f".{folder.name}.tmp")
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _say_problem(self, what: str, problem: Problem | None) -> None:
        if problem is not None and self._record is not None:
            self._record.warn(f"{what}: {problem}")


@contextmanager
def _clock(save: Pending) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        save.waited_seconds += time.perf_counter() - begin


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the published checkpoint with the lowest validation loss; one that is not finite is never the best."""
    losses: dict[Path, float] = {}
    for _, folder in steps_in(checkpoints):
        with suppress(InputError):
            loss = read_state(folder).get("validation_loss")
            if isinstance(loss, int | float) and math.isfinite(loss):
                losses[folder] = loss
    return min(losses, key=losses.__getitem__, default=None)
