"""The command line as a user runs it: whole processes, a small recipe, faults brought in from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

LIMIT_SECONDS = 120

RECIPE = """\
model: {layers: 2, width: 64, heads: 4, ffn: 96, vocabulary: 300, context_tokens: 128}
data:
  train: {path: "package:pydoc_data/topics.py", format: python}
  validation: 0.05
  sequence_tokens: 64
  tokenizer: train
  long_rows: split
optim: {lr: 1e-3, warmup_steps: 5}
train: {batch_sequences: 12, steps: 30, precision: fp32, evaluate_every: 15, sample_prompts: ["The for statement"], sample_tokens: 8}
output: {checkpoint_every: 10}
"""


class Cli:
    """Runs `tercet` in a folder of its own. `cache` is shared, so that text is prepared once a session."""

    def __init__(self, folder: Path, cache: Path):
        self.folder = folder
        self.environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        self.environment |= {"XDG_CACHE_HOME": str(cache), "XDG_CONFIG_HOME": str(cache / "config")}
        (folder / "small.yaml").write_text(RECIPE)

    def inject(self, code: str) -> None:
        """Run `code` at the start of every rank process, to bring a fault about (never in the supervisor)."""
        place = self.folder / "inject"
        place.mkdir(exist_ok=True)
        body = textwrap.indent(textwrap.dedent(code), "    ")
        (place / "sitecustomize.py").write_text(
            "import os, sys\n"
            "if 'tercet.training.rank' in sys.orig_argv:\n"
            "    RANK = int(os.environ['RANK'])\n" + body + "\n"
        )
        given = os.environ.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = os.pathsep.join([str(place), *([given] if given else [])])

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tercet", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments), code)

    def finish(self, process: subprocess.Popen[str], code: int | None = 0) -> subprocess.CompletedProcess[str]:
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"no end within {LIMIT_SECONDS} s\n{out}\n{err}") from None
        if code is not None:
            assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in out + err, out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def events(self, run: str, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / run / "events.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a line being written
                continue
        return [row for row in rows if kind in (None, row["event"])]

    def wait_for_step(self, run: str, step: int, process: subprocess.Popen[str]) -> None:
        self.wait_until(lambda: any(row["step"] >= step for row in self.events(run, "step")), process)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if process is not None and process.poll() is not None:
                self.finish(process, None)
                raise AssertionError(f"ended early with {process.returncode}")
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.02)

    def rank_processes(self, run: str) -> list[psutil.Process]:
        """Return the ranks' processes as run.lock names them."""
        found: list[psutil.Process] = []

        def there() -> bool:
            try:
                content = json.loads((self.folder / run / "run.lock").read_text())
                found[:] = [psutil.Process(r["pid"]) for r in content["ranks"]]
            except (OSError, ValueError, KeyError, psutil.Error):
                return False
            return bool(found)

        self.wait_until(there)
        return found

    def losses(self, run: str) -> list[float]:
        return [row["loss"] for row in self.events(run, "step")]

    def weights(self, run: str) -> bytes:
        return (self.folder / run / "model" / "model.safetensors").read_bytes()


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    """Return whether all processes have ended within the time (zombies of a dead parent count as ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(_runs, processes)):
            return True
        time.sleep(0.05)
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
