"""The ledger beside PyTorch's own memory tracker for FSDP2 (slow: it runs whole models under fake tensors)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tercet.planner.constants import load
from tercet.planner.job import of_strategy
from tercet.planner.ledger import states, tensors_at_peak, working
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.strategy import Strategy, Work

SCRIPT = Path(__file__).with_name("memory_tracker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "zero", "micro", "tokens", "recompute"),
    [
        ("smollm2-135m", 3, 2, 512, "none"),
        ("smollm2-135m", 2, 2, 512, "none"),
        ("smollm2-135m", 3, 8, 1024, "full"),
        ("smollm2-135m", 2, 8, 1024, "selective"),
        ("llama-3.2-1b", 3, 1, 2048, "full"),
    ],
)
def test_peak_of_one_step(name, zero, micro, tokens, recompute):
    command = [sys.executable, str(SCRIPT), name, str(zero), str(micro), str(tokens), recompute]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    tracked = json.loads(run.stdout.splitlines()[-1])
    counts = Counts(preset(name))
    strategy = Strategy(
        ranks=3, zero=zero, micro_batch=micro, recompute=recompute, reduce_gradients="every_micro_batch"
    )
    job = of_strategy(strategy, Work(tokens, 3 * micro))
    optimizer = states(counts, job)["peak"]["optimizer"]  # the tracker is given none
    assert tensors_at_peak(counts, job, load()) - optimizer == pytest.approx(tracked["Total"], rel=0.04)
    if tracked.get("ACT", 0) > tracked["Total"] / 2:  # at the loss: all activations and its workspace
        work = working(counts, job, load())
        assert work["activations"] + work["logits"] == pytest.approx(tracked["ACT"], rel=0.04)
