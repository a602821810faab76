"""tercet rehearse as a user runs it: figures beside the plan, exit 3 at the operator that finds no memory."""

from __future__ import annotations

import json

import pytest

from tests.cli import Cli

TINY = ["model.layers=2", "train.batch_sequences=4", "data.sequence_tokens=256"]


@pytest.mark.slow
def test_what_fits_is_shown_beside_the_plan(cli: Cli):
    done = cli.run("rehearse", "smollm2-135m", "--gpus", "1x4090", *TINY, "--output", "out", "--json")
    found = json.loads(done.stdout)
    assert found["fits"] and found["step"]["kernels"] > 100 and found["planned"]["card_bytes"] > 0
    assert json.loads((cli.folder / "out/rehearsal.json").read_text()) == found


@pytest.mark.slow
def test_a_card_that_is_too_small_names_the_operator(cli: Cli):
    keys = ["strategy=single", "strategy.micro_batch=4", "train.batch_sequences=4", "strategy.recompute=none"]
    done = cli.run("rehearse", "qwen3-1.7b", "--gpus", "1x4090", *keys, code=None)
    assert done.returncode == 3
    assert "operator" in done.stdout + done.stderr and "Traceback" not in done.stderr
