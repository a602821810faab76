"""G52: after resuming, from a checkpoint or from nothing, each step and each validation is there once: TensorBoard, events."""

from __future__ import annotations

import pytest

from tercet.spec.run_folder import RunFolder
from tercet.training.record import Recorder
from tests.cli import gone

STEP = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 10, "seconds": 1.0, "tokens_per_second": 10.0}


def shown(run: RunFolder, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0}).Reload()
    return [(e.step, e.value) for e in read.Scalars(name)]


def session(run: RunFolder, first: int, last: int, mark: float, evaluate: bool = True) -> None:
    """Do steps first + 1 to last, evaluating every third after its save; `mark` tells the sessions apart."""
    record = Recorder(run, 20, None, first)
    for step in range(first + 1, last + 1):
        record.step(step, loss=mark, **STEP)
        if step % 3 == 0 and evaluate:
            record.validation(step, mark, 10)
    record.close()


@pytest.mark.parametrize("resumed_at", [6, 5, 0])
def test_each_once(tmp_path, resumed_at):
    run = RunFolder(tmp_path)
    session(run, 0, 8, 1.0)
    session(run, resumed_at, 10, 2.0)
    old = [(s, 1.0) for s in range(1, resumed_at + 1)]
    assert shown(run, "train/loss") == old + [(s, 2.0) for s in range(resumed_at + 1, 11)]
    expected = [(s, 1.0 if s <= resumed_at else 2.0) for s in (3, 6, 9)]
    assert shown(run, "validation/loss") == expected
    steps = [e for e in run.read_events() if e["event"] == "step"]
    assert [(e["step"], e["loss"]) for e in steps] == shown(run, "train/loss")
    evaluated = [e for e in run.read_events() if e["event"] == "evaluate"]
    assert [(e["step"], e["validation_loss"]) for e in evaluated] == expected


def test_twice_resumed(tmp_path):
    run = RunFolder(tmp_path)
    session(run, 0, 8, 1.0)
    session(run, 4, 7, 2.0)
    session(run, 6, 9, 3.0)
    losses = [1.0] * 4 + [2.0] * 2 + [3.0] * 3
    assert shown(run, "train/loss") == list(zip(range(1, 10), losses, strict=True))


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(cli):
    """A real run, killed after some steps: resumed, it begins again, and its record with it."""
    process = cli.start(
        "train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=100000", "optim.schedule=constant",
        "output.checkpoint_every=0", "train.evaluate_every=0", "train.sample_prompts=[]", "data.validation=none",
    )  # fmt: skip
    cli.wait_for_step("run", 2, process)
    (rank,) = cli.rank_processes("run")
    process.kill()
    cli.finish(process, -9)
    assert gone([rank])
    assert not list((cli.folder / "run" / "checkpoints").glob("*"))
    resumed = cli.run("train", "--resume", "run", "train.steps=4")
    assert "begins again at step 1" in resumed.stderr
    assert [e["step"] for e in cli.events("run", "step")] == [1, 2, 3, 4]
    assert [step for step, _ in shown(RunFolder(cli.folder / "run"), "train/loss")] == [1, 2, 3, 4]
