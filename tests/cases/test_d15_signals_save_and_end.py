"""D15, E04: the first signal saves once and ends, in every phase; the second ends at once; no process is left."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cli import gone

ENDLESS = ("train", "small.yaml", "--ranks", "3", "--output", "run", "train.steps=100000", "optim.schedule=constant")


def checkpoints(cli) -> list[str]:
    folder = cli.folder / "run" / "checkpoints"
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def resumes(cli, stopped_at: int) -> None:
    """The run continues where it was stopped: no step is done twice or left out."""
    cli.environment.pop("PYTHONPATH", None)
    cli.run("train", "--resume", "run", f"train.steps={stopped_at + 2}")
    assert [row["step"] for row in cli.events("run", "step")] == list(range(1, stopped_at + 3))


def last_step(cli) -> int:
    return cli.events("run", "step")[-1]["step"]


def test_sigterm_to_one_rank_while_training(cli):
    process = cli.start(*ENDLESS, "output.checkpoint_every=0", "train.evaluate_every=0", "data.validation=none")
    cli.wait_for_step("run", 3, process)
    ranks = cli.rank_processes("run")
    ranks[1].send_signal(signal.SIGTERM)
    done = cli.finish(process, 130)
    assert "saved" in done.stderr
    assert gone(ranks)
    step = last_step(cli)
    assert checkpoints(cli) == [f"step-{step:06d}"]
    assert len(cli.events("run", "checkpoint")) == 1
    assert not (cli.folder / "run" / "run.lock").exists()
    resumes(cli, step)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["evaluation", "save"])
def test_sigint_to_the_parent_in_other_phases(cli, phase):
    # The rank marks that it is in the phase, then stays in it until the signal is there.
    where = {
        "evaluation": "import tercet.engine.native as m; owner, name = m.NativeEngine, 'evaluate'",
        "save": "import tercet.training.checkpoint as m; owner, name = m.Checkpoints, '_publish'",
    }[phase]
    cli.inject(f"""
        {where}
        import pathlib, signal, time
        plain, seen = getattr(owner, name), []
        def slow(self, *args):
            if not seen and RANK == 0:
                seen.append(1)
                pathlib.Path('mark').touch()
                while not pathlib.Path('go').exists():
                    time.sleep(0.01)
                time.sleep(0.2)
            return plain(self, *args)
        setattr(owner, name, slow)
    """)
    process = cli.start(*ENDLESS, "output.checkpoint_every=4", "train.evaluate_every=6")
    cli.wait_until((cli.folder / "mark").exists, process)
    ranks = cli.rank_processes("run")
    process.send_signal(signal.SIGINT)
    (cli.folder / "go").touch()
    cli.finish(process, 130)
    assert gone(ranks)
    step = last_step(cli)
    assert checkpoints(cli)[-1] == f"step-{step:06d}"
    steps = [row["step"] for row in cli.events("run", "checkpoint")]
    assert len(steps) == len(set(steps)), "saved twice"
    if phase == "save":
        assert steps == [4], "a save that had just been completed was repeated"
    resumes(cli, step)


@pytest.mark.slow
def test_in_data_preparation(cli, tmp_path):
    cli.environment["XDG_CACHE_HOME"] = str(tmp_path / "empty-cache")
    cli.inject("""
        import pathlib, time
        import tercet.training.assembly as m
        plain = m.prepare_data
        def slow(*args):
            pathlib.Path(f'mark-{RANK}').touch()
            while True:
                time.sleep(0.01)
        m.prepare_data = slow
    """)
    process = cli.start(*ENDLESS)
    cli.wait_until(lambda: all((cli.folder / f"mark-{n}").exists() for n in range(3)), process)
    ranks = cli.rank_processes("run")
    process.send_signal(signal.SIGTERM)
    done = cli.finish(process, 130)
    assert "nothing to save" in done.stderr
    assert gone(ranks)


@pytest.mark.slow
def test_the_second_signal_ends_at_once(cli):
    cli.inject("""
        import pathlib, time
        import tercet.training.checkpoint as m
        def endless(self, *args):
            pathlib.Path('saving').touch()
            while True:
                time.sleep(0.01)
        m.Checkpoints._publish = endless
    """)
    process = cli.start(*ENDLESS, "output.checkpoint_every=3")
    cli.wait_until((cli.folder / "saving").exists, process)
    ranks = cli.rank_processes("run")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    while process.poll() is None and any(r.is_running() for r in ranks):
        process.send_signal(signal.SIGINT)  # two that arrive together count as one
        gone(ranks, 0.5)
    cli.finish(process, 130)
    assert gone(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_kill_leaves_no_process_and_resumes_bit_for_bit(cli, finished, victim):
    whole, run = finished
    process = cli.start("train", "small.yaml", "--ranks", "3", "--output", "run")
    cli.wait_for_step("run", 12, process)
    ranks = cli.rank_processes("run")
    if victim == "rank":
        ranks[2].kill()
        done = cli.finish(process, 1)
        assert "rank 2 was killed by signal 9" in done.stderr
    else:
        process.kill()
        cli.finish(process, -9)
    assert gone(ranks)
    done = cli.run("train", "--resume", "run")
    assert "resumed from" in done.stderr
    assert cli.weights("run") == whole.weights(run)
    assert cli.losses("run") == whole.losses(run)
    assert json.loads((cli.folder / "run" / "summary.json").read_text())["finished"]
