"""The files of a run folder: names, and readers without torch. Training writes them, report shows them."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tercet.errors import InputError

MANIFEST, STATE, AFTER = "manifest.json", "state.json", "after.json"  # of a checkpoint
FORMAT = 1  # grows when a file here changes its meaning


@dataclass(frozen=True)
class RunFolder:
    """Names of what lies in a run folder. Its format: docs/reference/run-folder.md."""

    path: Path

    @property
    def resume(self) -> str:
        """The command that goes on with the run, as a shell reads it."""
        return f"tercet train --resume {shlex.quote(str(self.path))}"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def data_page(self) -> Path:
        return self.path / "data.html"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def rehearsal(self) -> Path:
        return self.path / "rehearsal.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def checkpoint_of(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events in order. A torn last line (a kill while writing) is left out."""
        return self.scan_events()[0]

    def scan_events(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the events in order and the numbers (from 1) of whole lines that hold none.

        A last line without its end is torn by a kill, not damaged: it is in neither. Raises InputError that
        names the file when it cannot be read.
        """
        if not self.events.exists():
            return [], []
        try:
            content = self.events.read_bytes()
        except OSError as error:
            raise InputError(f"{self.events} cannot be read: {error.strerror}") from None
        lines = content.split(b"\n")  # not splitlines: a carriage return belongs to a text
        rows, damaged = [], []
        for number, line in enumerate(lines, 1):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("event"), str):
                rows.append(row)
            elif line.strip() and number < len(lines):
                damaged.append(number)
        return rows, damaged

    def read_summary(self) -> dict[str, Any] | None:
        """Return summary.json's content, None without one. Raises InputError, with the way out, when it is damaged."""
        if not self.summary.exists():
            return None
        try:
            return read_json(self.summary)
        except InputError as error:
            hint = f"Remove it; {self.resume} then goes on from the newest checkpoint and writes it anew."
            raise InputError(error.message, error.hint or hint) from None

    def read_plan(self) -> dict[str, Any] | None:
        return read_json(self.plan) if self.plan.exists() else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's content, an object. Raises InputError that names the file."""
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path} cannot be read: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it holds a {type(content).__name__}, not an object")
    return content


def state_bytes(state: dict[str, Any]) -> bytes:
    """Return a checkpoint's state as JSON that gives every float back: those that JSON lacks stand as texts."""
    plain = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in state.items()}
    return (json.dumps(plain, indent=2) + "\n").encode()


def read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state, with what was added after the save. Raises InputError that names the file."""
    path = folder / STATE
    state = _floats(path)
    if not isinstance(state.get("step"), int):
        raise InputError(f"{path} is damaged: it holds no step")
    return {**state, **read_after(folder)}


def read_after(folder: Path) -> dict[str, float]:
    """Return what was added to a checkpoint after it was saved; nothing when that is missing or damaged."""
    try:
        return {k: v for k, v in _floats(folder / AFTER).items() if isinstance(v, int | float)}
    except InputError:
        return {}


def _floats(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} cannot be read: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it holds a {type(content).__name__}, not an object")
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in content.items()}


def open_run(path: str | Path) -> RunFolder:
    """Return an existing run folder. Raises InputError when it is none."""
    folder = RunFolder(Path(path).expanduser())
    if not folder.recipe.is_file():
        hint = "Give the folder that train printed."
        raise InputError(f"{path} is not a run folder: it has no recipe.yaml", hint)
    return folder
