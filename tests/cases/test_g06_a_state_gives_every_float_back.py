"""G06: losses that are not finite are saved, read back and never the best."""

from __future__ import annotations

import json
import math
import struct

import pytest

from tercet.report.story import read_checkpoints
from tercet.spec.run_folder import read_state
from tercet.training.checkpoint import best_checkpoint, find_checkpoint, steps_in
from tests.cases.checkpoints import SmallEngine, checkpoints, state

FLOATS = [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 1.7976931348623157e308, 2.0**-1074 * 3]


@pytest.mark.parametrize("value", FLOATS, ids=map(repr, FLOATS))
def test_every_float(tmp_path, value):
    keeper = checkpoints(tmp_path)
    keeper.save(SmallEngine(), {**state(1), "train_loss": value})
    keeper.amend(1, validation_loss=value)
    found = find_checkpoint(tmp_path / "checkpoints")
    for key in ("train_loss", "validation_loss"):
        back = found.state[key]
        assert math.isnan(back) if math.isnan(value) else struct.pack("d", back) == struct.pack("d", value)
    for name in ("state.json", "after.json"):
        json.loads((found.folder / name).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_one_written_before_this_is_read(tmp_path):
    checkpoints(tmp_path).save(SmallEngine(), state(1))
    folder = steps_in(tmp_path / "checkpoints")[0][1]
    (folder / "state.json").write_text('{"step": 1, "validation_loss": NaN}')
    assert math.isnan(read_state(folder)["validation_loss"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_the_best(tmp_path, bad):
    keeper = checkpoints(tmp_path, keep=1)
    for step, loss in ((1, bad), (2, 3.0), (3, bad), (4, 4.0), (5, bad)):
        keeper.save(SmallEngine(), state(step))
        keeper.amend(step, validation_loss=loss)
    assert best_checkpoint(tmp_path / "checkpoints").name == "step-000002"
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [5, 2]
    assert [s.step for s in read_checkpoints(tmp_path / "checkpoints") if s.best] == [2]


@pytest.mark.slow
def test_a_run_whose_validation_is_not_finite_resumes(cli):
    cli.inject("""
        import tercet.engine.native as m
        m.NativeEngine.evaluate = lambda self, batch: (float('nan'), batch.trained_tokens)
    """)
    short = ("output.keep=1", "output.checkpoint_every=2", "train.evaluate_every=2", "train.sample_prompts=[]")
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=4", *short)
    assert "validation loss nan" in done.stderr
    assert [e["value"] for e in cli.events("run", "evaluate")] == ["nan", "nan"]
    cli.run("train", "--resume", "run", "train.steps=6")
    assert [e["step"] for e in cli.events("run", "step")] == list(range(1, 7))
