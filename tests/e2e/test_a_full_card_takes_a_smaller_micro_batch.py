"""A plan's micro-batch that does not fit after all is halved, the effective batch kept, and the run goes on by itself."""

from __future__ import annotations

import json

import pytest

# A card that has room for so many rows, on one rank alone: others would wait for it in a collective.
FULL = """
    import torch
    import tercet.engine.native as m
    plain = m.NativeEngine.step
    def step(self, batches, *args, **kwargs):
        if RANK == {rank} and self.steps_done >= {begin} and max(len(b.rows) for b in batches) > {room}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(self, batches, *args, **kwargs)
    m.NativeEngine.step = step
"""


@pytest.mark.parametrize(
    ("ranks", "begin", "tried"),
    [
        (1, 3, [12, 6]),
        pytest.param(1, 0, [12, 6, 3, 2], marks=pytest.mark.slow),
        pytest.param(3, 3, [4, 2], marks=pytest.mark.slow),
    ],
)
def test_the_run_goes_on_with_half_the_rows_and_the_same_updates(cli, ranks, begin, tried):
    room = tried[-1]
    keys = ("train.steps=6", "output.checkpoint_every=2", "train.sample_prompts=[]", "--ranks", str(ranks))
    cli.run("train", "small.yaml", "--output", "plain", f"strategy.micro_batch={room}", *keys)
    cli.inject(FULL.format(rank=ranks - 1, begin=begin, room=room))
    done = cli.run("train", "small.yaml", "--output", "run", *keys)
    said = " ".join((done.stdout + done.stderr).split())
    assert "CUDA out of memory" in said and f"begins again with strategy.micro_batch={room} x accumulation" in said
    plan = json.loads((cli.folder / "run" / "plan.json").read_text())
    assert plan["micro_batch"] == plan["strategy"]["micro_batch"] == room
    assert cli.losses("run") == pytest.approx(cli.losses("plain"), rel=1e-5)
    assert [e["micro_batch"] for e in cli.events("run") if e["event"] in ("start", "resume")] == tried
    assert [e["step"] for e in cli.events("run", "resume")] == ([2] if begin else []), (
        "what was saved is not done again"
    )
    # A later start takes what has fitted and meets no full card.
    again = cli.run("train", "--resume", "run", "train.steps=7")
    assert "out of memory" not in again.stdout + again.stderr and len(cli.losses("run")) == 7


def test_a_micro_batch_that_was_asked_for_is_nobodys_to_change(cli):
    cli.inject(FULL.format(rank=0, begin=0, room=2))
    done = cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", "strategy.micro_batch=6", code=1)
    assert "CUDA out of memory" in done.stderr and "Lower strategy.micro_batch" in done.stderr
    assert "begins again" not in done.stdout + done.stderr
