"""tercet train with its state in files on NVMe: killed, resumed, exported, loaded by transformers; no file is left."""

from __future__ import annotations

import pytest

from tercet.engine.deepspeed.async_io import built_in, ensure_built, why_not_here
from tests.deepspeed_tiny import needs_deepspeed

pytestmark = [needs_deepspeed, pytest.mark.slow]
KEYS = (
    "model.width=512",
    "model.ffn=1024",
    "train.steps=12",
    "train.precision=bf16",
    "output.checkpoint_every=4",
    "strategy.engine=deepspeed",
    "strategy.offload.optimizer=nvme",
    "strategy.offload.weights=nvme",
)


@pytest.fixture
def nvme(cli, text_cache):
    if missing := why_not_here():
        pytest.skip("; ".join(missing))
    ensure_built(print, lambda done, total, phase: None)
    shared = text_cache / "tercet" / "extensions"
    shared.parent.mkdir(exist_ok=True)
    if not shared.exists():
        shared.symlink_to(built_in().parent)
    return cli


def losses(cli, run: str) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in cli.events(run, "step")}


def test_killed_resumed_exported(nvme):
    drive = nvme.folder / "drive"
    keys = (*KEYS, f"strategy.offload.nvme_path={drive}")
    nvme.run("train", "small.yaml", *keys, "--ranks", "2", "--output", "whole")
    assert not list(drive.iterdir())
    nvme.inject(
        """
        import tercet.engine.deepspeed.engine as module
        step = module.DeepSpeedEngine.step
        def killed(self, *a, **k):
            if RANK == 1 and self.steps_done == 6:
                os.kill(os.getpid(), 9)
            return step(self, *a, **k)
        module.DeepSpeedEngine.step = killed
        """
    )
    killed = nvme.run("train", "small.yaml", *keys, "--ranks", "2", "--output", "run", code=1)
    assert "SIGKILL" in killed.stderr
    assert not list(drive.iterdir()), "files of a killed run stayed"
    del nvme.environment["PYTHONPATH"]
    nvme.run("train", "--resume", "run")
    expected, got = losses(nvme, "whole"), losses(nvme, "run")
    assert {s: got[s] for s in range(5, 13)} == {s: expected[s] for s in range(5, 13)}
    assert not list(drive.iterdir())
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(nvme.folder / "run" / "model").config.hidden_size == 512
