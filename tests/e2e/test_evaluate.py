"""tercet evaluate on a run: its own validation data, the figure of its own last evaluation."""

from __future__ import annotations

import json

import pytest


def test_a_run_is_evaluated_on_its_validation_data(finished):
    cli, run = finished
    summary = json.loads((cli.folder / run / "summary.json").read_text())
    done = cli.run("evaluate", run, f"{run}/model", "--json", "--batch", "5")
    own, as_folder = json.loads(done.stdout)["models"]
    assert own["loss"] == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert as_folder["loss"] == own["loss"] and own["bits_per_byte"] > 0
