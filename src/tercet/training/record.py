"""What a run leaves behind while it runs: events.jsonl, TensorBoard, and one line on the console of rank 0."""

from __future__ import annotations

import errno
import io
import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tercet.spec.run_folder import RunFolder
from tercet.training.line import full_step_seconds, step_line
from tercet.units import show_seconds

WARM_UP_STEPS = 2  # the first steps allocate and compile: no measure of speed
FULL = (errno.ENOSPC, errno.EDQUOT)
FOLLOWING = ("evaluate", "sample")  # what comes after a step's checkpoint
PLAIN_SECONDS = 5.0  # between two plain lines when the console is no terminal


def write_json(path: Path, content: Any) -> None:
    replace_file(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new, never a part, after a power cut too."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Pace:
    """Speed and remaining time from this session's recent steps; saves and evaluations are not in them."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=50)
        self._seen = 0

    def add(self, seconds: float) -> None:
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            self._seconds.append(seconds)

    def remaining(self, steps: int) -> tuple[float, float] | None:
        """Return (low, high) seconds for `steps` more, from the middle half of recent steps; None at first."""
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        quarter = len(ordered) // 4
        middle = ordered[quarter : len(ordered) - quarter] or ordered
        if self._seen < 10:
            return steps * ordered[0], steps * ordered[-1]
        estimate = steps * statistics.fmean(middle)
        return estimate, estimate


class Recorder:
    """Writes what rank 0 records. `console` may be None: then nothing is shown, only written.

    A log that cannot be written is said once and never ends a run: only flush(), for a save, raises a full disk.
    """

    def __init__(
        self,
        run: RunFolder,
        total_steps: int,
        console: Console | None,
        first_step: int = 0,
        done_there: Collection[str] = ("evaluate", "sample"),
        sources: Sequence[str] = (),
    ):
        """`first_step`: the checkpoint's that is resumed, or 0; `done_there`: its events that count as done; `sources`:
        names of those that the data is mixed of."""
        self._run, self._total, self._console = run, total_steps, console
        self._pace = Pace()
        self._unwritten = bytearray()
        self._board: Any = None
        self._lost: set[str] = set()  # logs that failed: said once
        self._first_step, self._sources = first_step, source_names(sources)
        self._last_line = 0.0
        self._least_seconds = full_step_seconds(run.read_plan())
        trim_events(run, first_step, done_there)
        self._file = run.events.open("ab", buffering=0)
        self._progress: Progress | None = None
        if console is not None and console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=8),
                TextColumn("{task.fields[line]}"),
                console=console,
                transient=False,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, line="")
            self._progress.start()

    # TensorBoard costs half a second to import: opened at the first number, not before the first step.
    def _scalar(self, name: str, value: float, step: int) -> None:
        if "TensorBoard" in self._lost:
            return
        try:
            if self._board is None:
                self._board = self._open_board()
            self._board.add_scalar(name, value, step)
        except Exception as error:  # its writer is a thread, its folder may have a name that it cannot encode
            self._lose("TensorBoard", error)

    def _open_board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if self._first_step == 0:
            shutil.rmtree(self._run.tensorboard, ignore_errors=True)  # of a start that reached no checkpoint
        # Points of this step and later are of a session that went further than its last checkpoint.
        return SummaryWriter(str(self._run.tensorboard), purge_step=self._first_step + 1)

    def _lose(self, log: str, error: Exception) -> None:
        if log in self._lost:
            return
        self._lost.add(log)
        self.warn(f"{log} cannot be written, training goes on without it: {type(error).__name__}: {error}")

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event. What cannot be written is kept in memory and written when that is possible again."""
        row = {"event": kind, "time": time.time(), **fields}
        self._unwritten += orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        try:
            self._drain()
        except OSError as error:
            if error.errno not in FULL:
                self._lose(self._run.events.name, error)

    def _drain(self) -> None:
        while self._unwritten:
            written = self._file.write(self._unwritten)  # on a disk that is getting full, perhaps not all of it
            del self._unwritten[:written]

    def flush(self) -> None:
        """Bring all events to the disk, before a checkpoint that follows them. Raises OSError when it is full."""
        try:
            self._drain()
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno in FULL:
                raise
            self._lose(self._run.events.name, error)

    def warn(self, text: str) -> None:
        """Say and record something that went wrong without ending the run."""
        self.event("warning", message=text)
        self.say(text)

    def step(self, step: int, **fields: Any) -> None:
        """Record a finished step (1-based count of steps done)."""
        self.event("step", step=step, **fields)
        self._pace.add(fields["seconds"])
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "expert_load", "idle_experts", "loss_scale"):
            if name in fields:
                self._scalar(f"train/{name}", fields[name], step)
        for name, value in zip(self._sources, fields.get("source_loss", ()), strict=False):
            if value is not None:
                self._scalar(f"train/loss of {name}", value, step)
        line = step_line(fields, self._least_seconds) + self._eta(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, line=line)
        elif self._console is not None:
            now = time.monotonic()
            if step in (1, self._total) or now - self._last_line >= PLAIN_SECONDS:
                self._last_line = now
                self.say(f"step {step}/{self._total}  {line}")

    def _eta(self, step: int) -> str:
        left = self._pace.remaining(self._total - step)
        if left is None or step >= self._total:
            return ""
        low, high = show_seconds(left[0]), show_seconds(left[1])
        return f"  {low} left" if low == high else f"  {low} to {high} left"

    def validation(self, step: int, loss: float, tokens: int) -> None:
        finite = {"validation_loss": loss} if math.isfinite(loss) else {"validation_loss": None, "value": repr(loss)}
        self.event("evaluate", step=step, tokens=tokens, **finite)
        self._scalar("validation/loss", loss, step)
        self.say(f"step {step}/{self._total}  validation loss {loss:.4f}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.event("sample", step=step, prompt=prompt, text=text)

    def say(self, text: str) -> None:
        """Show one line to the user; above the progress bar when there is one."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._board is not None:
            try:
                self._board.close()
            except Exception as error:
                self._lose("TensorBoard", error)
        try:
            self.flush()
        except OSError as error:
            self.say(f"{self._run.events} lacks its last lines: {error.strerror}")
        self._file.close()


def source_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each source, in the order of the recipe: the last part of its path, numbered where
    several have it."""
    short = [path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path for path in paths]
    return [f"{n} {name}" if short.count(name) > 1 else name for n, name in enumerate(short, 1)]


def trim_events(run: RunFolder, step: int, done_there: Collection[str]) -> None:
    """Drop what an interrupted run recorded after the checkpoint that is being resumed: it is done again.

    So is what followed the save at the same step, unless the checkpoint knows it as done. `step` 0: the run ended
    before its first checkpoint, and all its steps are done again.
    """
    if not run.events.exists():
        return

    def stays(row: dict[str, Any]) -> bool:
        there = row.get("step", 0)
        if not isinstance(there, int):  # damaged
            return False
        return there < step or (there == step and (row["event"] not in FOLLOWING or row["event"] in done_there))

    content = b"".join(orjson.dumps(row) + b"\n" for row in run.read_events() if stays(row))
    replace_file(run.events, content)


def safe_console(file: io.TextIOBase | TextIO) -> Console:
    """Return a Console that never raises on characters that its encoding lacks."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    return Console(file=cast(TextIO, file), soft_wrap=True)


@contextmanager
def preparation_bar(console: Console | None) -> Iterator[Callable[[int, int, str], None]]:
    """Yield what draws (done, total, phase) of a long preparation; draws nothing when there is no terminal."""
    if console is None or not console.is_terminal:
        yield lambda done, total, phase: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(bar_width=24), console=console, transient=True) as bar:
        task = bar.add_task("prepare")

        def show(done: int, total: int, phase: str) -> None:
            bar.update(task, completed=done, total=total, description=phase)

        yield show
