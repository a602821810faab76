"""tercet rehearse as a user runs it: figures beside the plan, exit 3 at the operator that finds no memory."""

from __future__ import annotations

import json
import re

import pytest

from tercet.planner.answer import plan
from tests.cli import Cli

TINY = ["model.layers=2", "train.batch_sequences=4", "data.sequence_tokens=256"]


@pytest.mark.slow
def test_what_fits_is_shown_beside_the_plan(cli: Cli):
    done = cli.run("rehearse", "smollm2-135m", "--gpus", "1x4090", *TINY, "--output", "out", "--json")
    found = json.loads(done.stdout)
    assert found["fits"] and found["step"]["kernels"] > 100 and found["planned"]["card_bytes"] > 0
    assert json.loads((cli.folder / "out/rehearsal.json").read_text()) == found
    step = found["step"]
    assert sum(step["by_what_was_busy"].values()) == pytest.approx(step["seconds"], rel=1e-6)
    events = json.loads((cli.folder / "out/trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == step["kernels"] + sum(step["collectives"].values())
    assert (cli.folder / "out/rehearsal.svg").read_text().startswith("<svg")
    assert found["save"]["bytes"] > found["peak"]["rows"]["weights"]


@pytest.mark.slow
def test_a_fault_on_purpose_ends_the_rehearsal_with_its_words(cli: Cli):
    done = cli.run("rehearse", "smollm2-135m", "--gpus", "1x4090", *TINY, "--fault", "lost:900", code=1)
    assert "as asked for: card 0 is lost" in done.stdout and "operator 900" in done.stdout
    done = cli.run("rehearse", "smollm2-135m", "--gpus", "1x4090", *TINY, "--fault", "oom:900", code=3)
    assert re.search(r"operator 9\d\d", done.stdout) and "Held:" in done.stdout


@pytest.mark.slow
def test_a_card_that_is_too_small_names_the_operator(cli: Cli):
    keys = ["strategy=single", "strategy.micro_batch=4", "train.batch_sequences=4", "strategy.recompute=none"]
    done = cli.run("rehearse", "qwen3-1.7b", "--gpus", "1x4090", *keys, code=None)
    assert done.returncode == 3
    assert "operator" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_the_end_of_a_card_is_the_plans(cli):
    """What a plan calls usable holds the context too: a rehearsal that had more would fit what no card does."""
    found = json.loads(cli.run("rehearse", "first-light", "--gpus", "3x4090", "--json").stdout)
    planned = plan("first-light", [], gpus="3x4090")["strategies"][0]
    assert found["capacity_bytes"] + found["outside_bytes"] == planned["usable_bytes"]
    assert found["planned"]["card_bytes"] == planned["card_bytes"] > found["outside_bytes"]
