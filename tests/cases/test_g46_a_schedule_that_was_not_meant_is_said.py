"""G46: warm-up longer than the run, a decay longer than what is left, a last step that changes nothing: said."""

from __future__ import annotations

import pytest

from tercet.spec.recipe import OptimSection
from tercet.training.schedule import learning_rate, schedule_remarks


@pytest.mark.parametrize(
    ("optim", "steps", "words"),
    [
        ({"warmup_steps": 100}, 20, ["warmup_steps is 100", "20 steps", "20% of optim.lr", "optim.warmup_steps=2"]),
        ({"warmup_steps": 20}, 20, ["all of it is warm-up", "100% of optim.lr"]),
        ({"schedule": "wsd"}, 20, ["last step's learning rate is 0", "optim.min_lr_ratio=0.1"]),
        (
            {"schedule": "wsd", "decay_steps": 50, "warmup_steps": 5, "min_lr_ratio": 0.1},
            20,
            ["decay_steps is 50", "only 15 of 20", "optim.decay_steps=4"],
        ),
    ],
)
def test_said_with_what_was_probably_meant(optim, steps, words):
    (remark,) = schedule_remarks(OptimSection(**optim), steps)
    for word in words:
        assert word in remark
    if "=" in words[-1]:  # the key with its value, and no digit more
        assert remark.endswith(words[-1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 5, 19, 20, 100])
def test_every_last_step_without_a_rate_is_said_and_no_other(schedule, warmup):
    for ratio in (0.0, 0.1):
        optim = OptimSection(schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
        said = any("last step" in r for r in schedule_remarks(optim, 20))
        assert said == (learning_rate(optim, 19, 20) == 0)


def test_a_usual_schedule_says_nothing():
    assert schedule_remarks(OptimSection(warmup_steps=5, min_lr_ratio=0.1), 100) == []
    assert schedule_remarks(OptimSection(), 1) == []


@pytest.mark.slow
def test_a_run_says_it_once(cli):
    done = cli.run(
        "train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=3", "train.sample_prompts=[]",
        "optim.warmup_steps=100", "train.evaluate_every=0", "output.checkpoint_every=0",
    )  # fmt: skip
    assert done.stderr.count("optim.warmup_steps is 100 and the run has 3 steps") == 1
