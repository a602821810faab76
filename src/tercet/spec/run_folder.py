"""The files of a run folder: names, and readers that need no torch. Training writes them, report shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tercet.errors import InputError

FORMAT = 1  # grows when a file here changes its meaning


@dataclass(frozen=True)
class RunFolder:
    """`recipe.yaml plan.json events.jsonl summary.json run.lock logs/ checkpoints/ model/ tensorboard/ report.html`"""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

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
        if not self.events.exists():
            return []
        rows = []
        for line in self.events.read_bytes().splitlines():
            try:
                rows.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue
        return rows

    def read_summary(self) -> dict[str, Any] | None:
        return read_json(self.summary) if self.summary.exists() else None

    def read_plan(self) -> dict[str, Any] | None:
        return read_json(self.plan) if self.plan.exists() else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's content. Raises InputError that names the file."""
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def open_run(path: str | Path) -> RunFolder:
    """Return an existing run folder. Raises InputError when it is none."""
    folder = RunFolder(Path(path).expanduser())
    if not folder.recipe.is_file():
        raise InputError(f"{path} is not a run folder: it has no recipe.yaml", "Give the folder that train printed.")
    return folder
