"""Checkpoints: when and where. Atomic publish with a manifest, keep the last k and the best, wait for space.

A folder `checkpoints/step-000100/` exists only when it is complete: it is written under a temporary name and
renamed, by rank 0 alone, after every rank has finished. `manifest.json` (sizes and hashes) is written last.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.engine import Engine, SaveHandle
from tercet.engine.shards import file_hash
from tercet.errors import InputError, TercetError
from tercet.parallel.world import World
from tercet.spec.run_folder import RunFolder, read_json
from tercet.units import show_bytes

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
POLL_SECONDS = 2.0  # between two looks at a full disk


@dataclass(frozen=True)
class Found:
    folder: Path
    state: dict[str, Any]
    skipped: list[str]  # newer ones that were not complete, each with the reason


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every published checkpoint, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(p.name[5:]), p) for p in checkpoints.iterdir() if p.name.startswith("step-") and p.name[5:].isdigit()]
    return sorted(found, reverse=True)


def fault_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint (which file and how), or None when it is complete and undamaged."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"{manifest} is damaged"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if file_hash(path) != entry["blake2b"]:
            return f"{path} is damaged: its content does not match the manifest's hash"
    return None


def find_checkpoint(checkpoints: Path) -> Found | None:
    """Return the newest complete checkpoint, or None when none was ever published.

    Raises InputError naming the files when there are some but every one is damaged.
    """
    skipped = []
    for _, folder in steps_in(checkpoints):
        fault = fault_of(folder)
        if fault is None:
            return Found(folder, read_json(folder / STATE), skipped)
        skipped.append(fault)
    if skipped:
        raise InputError(
            "no checkpoint is complete: " + "; ".join(skipped),
            "Restore the file from a copy, or remove the checkpoints folder to begin again from step 0.",
        )
    return None


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints:
    """Every rank has one and calls the same methods at the same steps."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        keep: int,
        disk_full: str,
        needed_bytes: int,
        say: Callable[[str], None],
        stop_requested: Callable[[], bool],
    ):
        self._run, self._world, self._keep, self._disk_full = run, world, keep, disk_full
        self._needed_bytes = needed_bytes
        self._say, self._stop_requested = say, stop_requested
        self._pending: tuple[Path, SaveHandle, dict[str, Any]] | None = None
        self._temporary: Path | None = None
        self.last_step = -1  # newest published step of this session

    def save(self, engine: Engine, state: dict[str, Any]) -> None:
        """Write a checkpoint of `state["step"]`; on the CPU it is published when this returns.

        A full disk never touches an earlier checkpoint: what was begun is removed, then the run waits for space
        or stops, by output.disk_full. Raises TercetError when it stops.
        """
        self.finish()
        what = f"the checkpoint of step {state['step']}"
        while True:
            self.wait_for_space(what, self._needed_bytes)
            self._temporary = self._run.checkpoints / f".step-{state['step']:06d}.tmp"
            if self._world.rank == 0:
                self._make_temporary(self._temporary)
            self._world.barrier()
            self._pending = (self._temporary, engine.save(self._temporary), state)
            if not self._pending[1].done():
                return  # written behind the next steps; poll() or finish() publishes it
            if self.finish():
                return
            self._say(f"disk full: {what} was given up in the middle; trying again")
            self._pause(what, self._needed_bytes)

    def _make_temporary(self, folder: Path) -> None:
        self._run.checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in self._run.checkpoints.glob(".*.tmp"):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir()

    def poll(self) -> None:
        """Publish a background save once all ranks have written; cheap while there is none."""
        if self._pending is not None and not self._world.any(not self._pending[1].done()):
            self.finish()

    def finish(self) -> bool:
        """Wait for the pending save and publish it; return False when the disk was full and it was given up."""
        if self._pending is None:
            return True
        temporary, handle, state = self._pending
        self._pending = None
        files, problem = {}, None
        try:
            files = handle.wait()
        except OSError as error:
            problem = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        outcomes = self._world.gather((files, problem))
        problems = [p for _, p in outcomes if p]
        if problems:
            if self._world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self._world.barrier()
            if any(p != "full" for p in problems):
                raise TercetError(f"the checkpoint of step {state['step']} could not be written: {problems[0]}")
            if self._disk_full == "stop":
                self._raise_full(f"the checkpoint of step {state['step']}", self._needed_bytes)
            return False
        if self._world.rank == 0:
            self._publish(temporary, {k: v for part, _ in outcomes for k, v in part.items()}, state)
        self._world.barrier()
        self.last_step = state["step"]
        return True

    def _publish(self, temporary: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
        state_file = temporary / STATE
        state_file.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        files[STATE] = {"bytes": state_file.stat().st_size, "blake2b": file_hash(state_file)}
        with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "files": files}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        final = self._run.checkpoint_of(state["step"])
        if final.exists():  # a damaged one of the same step, passed over when resuming
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(self._run.checkpoints)
        self._prune()

    def _prune(self) -> None:
        """Remove what is neither among the last k nor the best; only after the new one stands."""
        steps = steps_in(self._run.checkpoints)
        kept = {folder for _, folder in steps[: self._keep]} | {best_checkpoint(self._run.checkpoints)}
        for _, folder in steps:
            if folder not in kept:
                # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under its name.
                doomed = folder.with_name(f".{folder.name}.tmp")
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def wait_for_space(self, what: str, needed_bytes: int) -> None:
        """Return when the disk has room for `what`; by output.disk_full wait for it or raise TercetError."""
        said = False
        while self._world.any(shutil.disk_usage(self._run.path).free < needed_bytes):
            if self._disk_full == "stop":
                self._raise_full(what, needed_bytes)
            if not said:
                self._say(
                    f"{self._full(what, needed_bytes)}; waiting until there is space (Ctrl-C stops without saving)"
                )
                said = True
            self._pause(what, needed_bytes)

    def _pause(self, what: str, needed_bytes: int) -> None:
        if self._world.any(self._stop_requested()):
            self._raise_full(what, needed_bytes)
        time.sleep(POLL_SECONDS)

    def _full(self, what: str, needed_bytes: int) -> str:
        free = shutil.disk_usage(self._run.path).free
        return f"disk full: {what} needs {show_bytes(needed_bytes)}, {show_bytes(free)} are free in {self._run.path}"

    def _raise_full(self, what: str, needed_bytes: int) -> None:
        raise TercetError(
            self._full(what, needed_bytes),
            f"Earlier checkpoints are unharmed. Free some space, then: tercet train --resume {self._run.path}",
        )


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the published checkpoint with the lowest validation loss, from the checkpoints' own states."""
    best: tuple[float, Path] | None = None
    for _, folder in steps_in(checkpoints):
        try:
            loss = json.loads((folder / STATE).read_text(encoding="utf-8")).get("validation_loss")
        except (OSError, ValueError):
            continue
        if loss is not None and (best is None or loss < best[0]):
            best = (loss, folder)
    return best[1] if best else None
