"""E08: one console line per event, a log file per rank, no carriage returns in a pipe; warnings carry their rank."""

from __future__ import annotations

from collections import Counter

import pytest


def test_lines(finished):
    cli, run = finished
    text = (cli.folder / "errors.txt").read_text()
    assert "\r" not in text
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.strip()]
    assert [line for line, times in Counter(lines).items() if times > 1] == []
    for what in ("validation loss", "step 1/30 ", "step 30/30  loss", "run folder"):
        wanted = 2 if what == "validation loss" else 1
        assert sum(what in line for line in lines) == wanted, what
    logs = sorted(p.name for p in (cli.folder / run / "logs").iterdir())
    assert logs == ["rank-0.log", "rank-1.log", "rank-2.log", "session.log"]
    for rank in range(3):
        assert f"rank {rank}: process" in (cli.folder / run / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.slow
def test_a_warning_of_rank_2_is_seen_with_its_rank(cli):
    cli.inject("""
        import logging
        import tercet.engine.native as m
        plain = m.NativeEngine.generate
        def generate(self, *args, **keys):
            if RANK == 2:
                logging.getLogger("tercet").warning("something is odd here")
            return plain(self, *args, **keys)
        m.NativeEngine.generate = generate
    """)
    done = cli.run("train", "small.yaml", "--ranks", "3", "--output", "run", "train.steps=2")
    lines = [line for line in done.stderr.splitlines() if "something is odd here" in line]
    assert lines == ["rank 2: something is odd here"]
