"""What a run leaves behind while it runs: events.jsonl, TensorBoard, and one line on the console of rank 0."""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tercet.spec.run_folder import RunFolder
from tercet.units import show_count, show_seconds

WARM_UP_STEPS = 2  # the first steps allocate and compile: no measure of speed
PLAIN_SECONDS = 5.0  # between two plain lines when the console is no terminal


def write_json(path: Path, content: Any) -> None:
    """Replace a file in one go: readers see the old content or the new, never a half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
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
    """Rank 0's pen. `console` may be None: then nothing is shown, only written."""

    def __init__(self, run: RunFolder, total_steps: int, console: Console | None, first_step: int = 0):
        self._run, self._total, self._console = run, total_steps, console
        self._pace = Pace()
        self._unwritten: list[bytes] = []
        self._board = None
        self._purge_step = first_step if first_step else None
        self._last_line = 0.0
        if first_step:
            trim_events(run, first_step)
        self._file = run.events.open("ab", buffering=0)
        self._progress: Progress | None = None
        if console is not None and console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                console=console,
                transient=False,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, line="")
            self._progress.start()

    # TensorBoard costs half a second to import: opened at the first number, not before the first step.
    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._run.tensorboard), purge_step=self._purge_step)
        self._board.add_scalar(name, value, step)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event. On a full disk events are kept in memory and written when there is space again."""
        row = {"event": kind, "time": time.time(), **fields}
        self._unwritten.append(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        try:
            while self._unwritten:
                self._file.write(self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def step(self, step: int, **fields: Any) -> None:
        """Record a finished step (1-based count of steps done)."""
        self.event("step", step=step, **fields)
        self._pace.add(fields["seconds"])
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "expert_load", "idle_experts"):
            if name in fields:
                self._scalar(f"train/{name}", fields[name], step)
        load = f"  fullest expert {fields['expert_load']:.2f}x" if "expert_load" in fields else ""
        line = f"loss {fields['loss']:.4f}{load}  {show_count(fields['tokens_per_second'])} tokens/s{self._eta(step)}"
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
        self.event("evaluate", step=step, validation_loss=loss, tokens=tokens)
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
            self._board.close()
        self._file.close()


def trim_events(run: RunFolder, step: int) -> None:
    """Drop what an interrupted run recorded after the checkpoint that is being resumed: it is done again."""
    rows = [row for row in run.read_events() if row.get("step", 0) <= step]
    temporary = run.events.with_name(".events.jsonl.tmp")
    temporary.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    os.replace(temporary, run.events)


def safe_console(file: TextIO) -> Console:
    """Return a Console that never raises on characters that its encoding lacks."""
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(file=file, soft_wrap=True)


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
