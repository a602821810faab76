"""Small run folders for tests of the report: what training writes, with figures that are easy to check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tercet.spec.recipe import build_recipe
from tercet.spec.run_folder import RunFolder

VERSIONS = {"tercet": "0.1.0", "torch": "2.13.0"}
ROWS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")


class FakeRun:
    """Writes events one by one, as a recorder does; `seconds` per step is 2 and tokens per step 1 000."""

    def __init__(self, folder: Path, steps: int = 4, name: str = "small"):
        self.run = RunFolder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.total, self.time = steps, 1_700_000_000.0
        tree = {
            "name": name,
            "model": {"layers": "2", "width": "32", "heads": "2", "ffn": "64", "vocabulary": "300"},
            "data": {"train": "texts.jsonl", "validation": "0.1", "sequence_tokens": "64"},
            "train": {"batch_sequences": "16", "steps": str(steps), "precision": "fp32"},
        }
        self.run.recipe.write_text(build_recipe(tree).to_yaml(), encoding="utf-8")

    def event(self, kind: str, **fields: Any) -> None:
        with self.run.events.open("ab") as file:
            file.write(json.dumps({"event": kind, "time": self.time, **fields}).encode() + b"\n")

    def begin(self, step: int = 0, ranks: int = 3) -> None:
        kind = "resume" if step else "start"
        self.event(
            kind,
            step=step,
            ranks=ranks,
            strategy="zero2",
            parameters=12345,
            total_steps=self.total,
            versions=VERSIONS,
        )

    def step(self, step: int, loss: float | None = None, **fields: Any) -> None:
        self.time += 2.0
        values = {
            "loss": 5.0 / step if loss is None else loss,
            "grad_norm": 1.0 + step,
            "lr": 1e-3 * step,
            "tokens": 1000,
            "seconds": 2.0,
            "tokens_per_second": 500.0,
        }
        self.event("step", step=step, **{**values, **fields})

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.step(number)

    def evaluate(self, step: int, loss: float) -> None:
        self.event("evaluate", step=step, validation_loss=loss, tokens=100)

    def checkpoint(self, step: int, loss: float | None = None) -> Path:
        folder = self.run.checkpoint_of(step)
        folder.mkdir(parents=True)
        (folder / "rank-0.safetensors").write_bytes(b"x" * 600)
        (folder / "state.json").write_text(json.dumps({"step": step, "ranks": 3, "validation_loss": loss}))
        files = {"rank-0.safetensors": {"bytes": 600, "blake2b": "0" * 40}}
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
        self.event("checkpoint", step=step, seconds=0.5)
        return folder

    def plan(self, **more: Any) -> dict[str, Any]:
        content = {
            "name": "zero2",
            "strategy": {"zero": 2, "ranks": 3, "micro_batch": 2, "recompute": "none"},
            "machine": {"kind": "cpu", "card": None, "ranks": 3},
            "moments": {
                "between_steps": dict(zip(ROWS, (400, 0, 0, 800, 0, 0, 0, 5000), strict=True)),
                "peak": dict(zip(ROWS, (1200, 0, 400, 800, 300, 200, 100, 5000), strict=True)),
            },
            "tokens_per_second": 600.0,
            "step_seconds": 1.5,
            **more,
        }
        self.run.plan.write_text(json.dumps(content))
        return content

    def end(self, step: int, validation_loss: float | None = None, **more: Any) -> dict[str, Any]:
        self.event("end", step=step, train_loss=5.0 / step, validation_loss=validation_loss)
        held = {"weights": 400, "master": 0, "gradients": 0, "optimizer": 800}
        content = {
            "format": 1,
            "finished": True,
            "steps": step,
            "tokens": 1000 * step,
            "train_loss": 5.0 / step,
            "validation_loss": validation_loss,
            "tokens_per_second": 500.0,
            "step_seconds": 2.0,
            "seconds": 90.0,
            "ranks": 3,
            "peak_bytes_per_rank": [7000, 8000, 6000],
            "memory": {
                "between_steps": [held, held, {**held, "weights": 380}],
                "peak": [{**held, "weights": 1200, "gradients": 400}] * 2 + [{**held, "weights": 1100}],
            },
            "versions": VERSIONS,
            **more,
        }
        self.run.summary.write_text(json.dumps(content))
        return content


def finished(folder: Path, steps: int = 4) -> FakeRun:
    fake = FakeRun(folder, steps)
    fake.plan()
    fake.begin()
    fake.steps(1, steps)
    fake.evaluate(steps, 2.0)
    fake.event("sample", step=steps, prompt="The for", text=" statement")
    fake.checkpoint(steps, 2.0)
    fake.end(steps, 2.0)
    return fake
