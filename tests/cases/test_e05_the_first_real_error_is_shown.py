"""E05: an error on one rank is told with rank, step and rows; a rank that never arrives is named with its stack."""

from __future__ import annotations

import pytest

from tests.cli import gone

WHERE = {
    "forward": ("tercet.model.decoder", "Decoder", "forward"),
    "loader": ("tercet.data.loader", "Loader", "micro_batches"),
    "save": ("tercet.engine.native", "NativeEngine", "save"),
}


@pytest.mark.parametrize("place", ["forward", *(pytest.param(p, marks=pytest.mark.slow) for p in ("loader", "save"))])
def test_rank_step_and_cause(cli, place):
    module, owner, name = WHERE[place]
    cli.inject(f"""
        import {module} as m
        plain, calls = m.{owner}.{name}, []
        def broken(self, *args, **kwargs):
            calls.append(1)
            if RANK == 1 and len(calls) >= (1 if {place == "save"} else 4):
                raise ValueError("the cause of it all")
            return plain(self, *args, **kwargs)
        m.{owner}.{name} = broken
    """)
    process = cli.start(
        "train", "small.yaml", "--ranks", "3", "--output", "run", "strategy=zero3", "output.checkpoint_every=4"
    )
    ranks = cli.rank_processes("run")
    done = cli.finish(process, 1)
    assert gone(ranks)
    last = done.stderr.strip().splitlines()
    assert "ValueError: the cause of it all" in last[-2]
    where = (
        "error: the checkpoint of step 4 could not be written: rank 1: " if place == "save" else "error: rank 1, step "
    )
    assert last[-2].startswith(where)
    if place == "forward":
        assert "rows" in last[-2]
    assert ("tercet train --resume" if place == "save" else "rank-1.log") in last[-1]
    assert "the cause of it all" in (cli.folder / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_its_stack(cli):
    cli.inject("""
        import time
        import tercet.engine.native as m
        plain, calls = m.NativeEngine.step, []
        def lost_in_thought(seconds):
            time.sleep(seconds)
        def step(self, *args, **kwargs):
            calls.append(1)
            if RANK == 2 and len(calls) == 3:
                lost_in_thought(1000)
            return plain(self, *args, **kwargs)
        m.NativeEngine.step = step
    """)
    process = cli.start("train", "small.yaml", "--ranks", "3", "--output", "run", "train.collective_timeout_seconds=3")
    ranks = cli.rank_processes("run")
    done = cli.finish(process, 1)
    assert gone(ranks)
    assert "rank 2 did not arrive" in done.stderr
    assert "lost_in_thought" in done.stderr
