"""E03: two jobs started at the same time on one machine both succeed; they share no port."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_both_succeed(cli):
    # Neither goes beyond its first step before the other has come as far: they really run at once.
    cli.inject("""
        import time
        from pathlib import Path
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        def step(self, *args):
            while self.steps_done == 1 and not all(Path(run, "events.jsonl").exists() for run in ("a", "b")):
                time.sleep(0.02)
            return plain(self, *args)
        m.NativeEngine.step = step
    """)
    common = ("train", "small.yaml", "--ranks", "2", "train.steps=5", "train.sample_prompts=[]")
    jobs = [cli.start(*common, "--output", name, f"train.seed={n}") for n, name in enumerate(("a", "b"))]
    for job in jobs:
        cli.finish(job)
    assert len(cli.losses("a")) == len(cli.losses("b")) == 5
    assert cli.losses("a") != cli.losses("b"), "the jobs have joined each other"
    again = ("--output", "c", "train.seed=0")
    cli.run(*common, *again)
    assert cli.losses("c") == cli.losses("a")


@pytest.mark.slow
def test_the_same_folder_is_refused_while_it_runs(cli):
    first = cli.start("train", "small.yaml", "--ranks", "2", "--output", "a", "train.steps=100000")
    cli.wait_for_step("a", 1, first)
    second = cli.run("train", "--resume", "a", code=1)
    assert f"in use by process {first.pid}" in second.stderr
    ranks = cli.rank_processes("a")
    first.kill()
    cli.finish(first, -9)
    from tests.cli import gone

    assert gone(ranks)
    # The lock file is still there, but its holder is dead: stale, so resuming works.
    assert (cli.folder / "a" / "run.lock").exists()
    cli.run("train", "--resume", "a", f"train.steps={max(row['step'] for row in cli.events('a', 'step')) + 1}")
