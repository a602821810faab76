"""B17: one process prepares, the others wait for a file lock and say so; a killed one leaves nothing
behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from tests.texts import made, section, sentence, write_rows

LIMIT = 60  # seconds; only a hang reaches it
SPAWN = multiprocessing.get_context("spawn")


def work(data, name, events, go):
    """Prepare; stop in front of the tokens until `go` is set."""
    from tercet.data.prepare import prepare

    def progress(done, total, phase):
        if phase == "tokenize" and not go.is_set():
            events.put((name, "tokenizing"))
            go.wait(LIMIT)

    def say(text):
        if text.startswith("waiting"):
            events.put((name, "waiting"))

    prepared = prepare(data, vocabulary=300, model_tokenizer=None, seed=0, say=say, progress=progress)
    events.put((name, "hit" if prepared.hit else "miss"))


@pytest.mark.slow
def test_a_preparation_longer_than_the_groups_time_out(cli, tmp_path):
    """Three ranks whose collectives give up after 2 s; the one that prepares takes twice as long."""
    cli.environment["XDG_CACHE_HOME"] = str(tmp_path / "empty")
    cli.inject("""
        import time
        from pathlib import Path
        import tercet.training.assembly as m
        plain = m.prepare
        def prepare(*args, progress, **keys):
            def held(done, total, phase):
                if phase == "tokenize" and not seen:
                    seen.append(1)
                    while not any("waiting" in p.read_text() for p in Path("run/logs").glob("rank-[12].log")):
                        time.sleep(0.02)
                    time.sleep(4)
                progress(done, total, phase)
            return plain(*args, progress=held, **keys)
        seen = []
        m.prepare = prepare
    """)
    short = ("train.steps=2", "train.sample_prompts=[]", "train.collective_timeout_seconds=2")
    done = cli.run("train", "small.yaml", "--ranks", "3", "--output", "run", *short)
    logs = [(cli.folder / "run" / "logs" / f"rank-{n}.log").read_text() for n in range(3)]
    waited = ["waiting" in log or (n == 0 and "waiting" in done.stderr) for n, log in enumerate(logs)]
    assert sum(waited) == 2, "two wait, and each says so"
    assert len(cli.losses("run")) == 2


@pytest.fixture
def data(tmp_path):
    return section(tmp_path, write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(50)]))


def test_three_processes_one_works_two_wait(data):
    events, go = SPAWN.Queue(), SPAWN.Event()
    processes = [SPAWN.Process(target=work, args=(data, n, events, go), daemon=True) for n in range(3)]
    processes[0].start()
    assert events.get(timeout=LIMIT) == (0, "tokenizing")
    processes[1].start()
    processes[2].start()
    assert {events.get(timeout=LIMIT) for _ in range(2)} == {(1, "waiting"), (2, "waiting")}
    go.set()
    assert {events.get(timeout=LIMIT) for _ in range(3)} == {(0, "miss"), (1, "hit"), (2, "hit")}
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0


def test_a_process_killed_half_way_blocks_nobody(tmp_path, data):
    # An event of its own for each: one that a killed process waited for is left locked.
    events, never, go = SPAWN.Queue(), SPAWN.Event(), SPAWN.Event()
    first = SPAWN.Process(target=work, args=(data, 0, events, never), daemon=True)
    second = SPAWN.Process(target=work, args=(data, 1, events, go), daemon=True)
    first.start()
    assert events.get(timeout=LIMIT) == (0, "tokenizing")
    second.start()
    assert events.get(timeout=LIMIT) == (1, "waiting")
    go.set()
    os.kill(first.pid, signal.SIGKILL)
    first.join(LIMIT)
    assert events.get(timeout=LIMIT) == (1, "miss")
    second.join(LIMIT)
    assert second.exitcode == 0


def test_what_a_killed_process_left_is_not_taken_for_complete(tmp_path, data):
    events, go = SPAWN.Queue(), SPAWN.Event()
    process = SPAWN.Process(target=work, args=(data, 0, events, go), daemon=True)
    process.start()
    assert events.get(timeout=LIMIT) == (0, "tokenizing")
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT)
    cache = tmp_path / "cache"
    assert list(cache.glob("*.building")) and not list(cache.glob("*/manifest.json"))
    prepared = made(tmp_path, tmp_path / "rows.jsonl")
    assert not prepared.hit and len(prepared.train.sources[0]) > 0
    assert not list(cache.glob("*.building"))
    assert made(tmp_path, tmp_path / "rows.jsonl").hit
