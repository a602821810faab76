"""G12, G13: a signal at any moment of the start ends it and leaves nothing; later ones say at once what comes."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import psutil
import pytest

from tercet.training.pace import sentence
from tests.cli import Cli, gone

ENDLESS = ("train", "small.yaml", "train.steps=100000", "optim.schedule=constant", "train.sample_prompts=[]")


def supervisor_hook(cli: Cli, code: str) -> None:
    """Run `code` at the start of the supervisor (not of its ranks)."""
    place = cli.folder / "hook"
    place.mkdir()
    body = "\n".join(f"    {line}" for line in code.splitlines())
    (place / "sitecustomize.py").write_text(
        f"import os, sys\nif sys.orig_argv[1:3] == ['-m', 'tercet']:\n    import pathlib, time\n{body}\n"
    )
    cli.environment["PYTHONPATH"] = str(place)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


MARK = "pathlib.Path('mark').touch()\n"
MOMENTS = {
    # At imports: the command line is not even there.
    "imports": "class Slow:\n    def find_spec(self, name, *rest):\n        if name == 'typer':\n"
    "            pathlib.Path('mark').touch(); time.sleep(60)\nsys.meta_path.insert(0, Slow())",
    "plan": "import tercet.training.session as m\ndef slow(*a):\n    pathlib.Path('mark').touch()\n    time.sleep(60)\n"
    "m.make_plan = slow",
    "self-test": "import tercet.probe.selftest as m\ndef slow(*a):\n    pathlib.Path('mark').touch()\n    time.sleep(60)\n"
    "m.environment_for = slow",
    "ranks": "import tercet.training.supervise as m\nplain = m._Ranks._start\ndef slow(self, rank, store):\n"
    "    process = plain(self, rank, store)\n    pathlib.Path('mark').touch()\n    time.sleep(1.0)\n    return process\n"
    "m._Ranks._start = slow",
}  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("imports", signal.SIGINT),
        ("plan", signal.SIGTERM),
        ("self-test", signal.SIGINT),
        ("ranks", signal.SIGINT),
        *(
            pytest.param(moment, number, marks=pytest.mark.slow)
            for moment in MOMENTS
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ),
    ],
)
def test_nothing_is_left(cli, moment, number):
    supervisor_hook(cli, MOMENTS[moment])
    process = cli.start(*ENDLESS, "--ranks", "2")
    cli.wait_until((cli.folder / "mark").exists, process)
    started = children(process)
    process.send_signal(number)
    done = cli.finish(process, None)
    assert process.returncode == (-number if moment == "imports" else 130), done.stderr
    assert gone(started)
    assert not list((cli.folder / "runs").glob("*")) if (cli.folder / "runs").exists() else True
    assert "AttributeError" not in done.stderr


def test_sigkill_of_the_supervisor_within_moments_of_starting_a_rank(cli):
    """The rank is still importing when its parent goes: it must not take whoever adopts it for its parent."""
    cli.inject("""
        import pathlib, time
        pathlib.Path(f'early-{os.getpid()}').touch()
        while os.getppid() == int(sys.orig_argv[-1]):  # until the parent has gone: the worst moment there is
            time.sleep(0.01)
    """)
    process = cli.start("train", "small.yaml", "--ranks", "2", "--output", "run")
    cli.wait_until(lambda: len(list(cli.folder.glob("early-*"))) == 2, process)
    started = [psutil.Process(int(p.name.partition("-")[2])) for p in cli.folder.glob("early-*")]
    process.kill()
    cli.finish(process, -9)
    assert gone(started)
    assert not cli.events("run"), "an orphan has trained"


def test_the_first_signal_says_at_once_what_comes_and_the_end_how_to_go_on(cli):
    """The step takes as long as the test likes; the answer comes while it runs."""
    cli.inject("""
        import pathlib, time
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        def step(self, *args):
            if self.steps_done == 3:
                pathlib.Path(f'mark-{RANK}').touch()
                while not pathlib.Path('go').exists():
                    time.sleep(0.01)
            return plain(self, *args)
        m.NativeEngine.step = step
    """)
    process = cli.start(*ENDLESS, "--ranks", "2", "--output", "run", "train.evaluate_every=0")
    cli.wait_until(lambda: all((cli.folder / f"mark-{n}").exists() for n in range(2)), process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("stopping"))
    assert "finishing step 4 (" in line and "then saving; again to discard" in line
    (cli.folder / "go").touch()
    done = cli.finish(process, 130)
    assert "stopped on request after step 4; saved" in done.stderr
    command = f"tercet train --resume {cli.folder}/run"
    assert done.stderr.strip().splitlines()[-1] == f"Continue with: {command}"
    again = cli.run(*command.split()[1:], "train.steps=5")
    assert "resumed from" in again.stderr


def test_the_time_that_is_left_is_of_this_step():
    assert "finishing step 8 (about 2.0 s)" in sentence(7, [3.0, 3.0, 3.0], 1.0)
    assert "next micro-batch begins, or ends (about 40.0 s)" in sentence(7, [50.0, 50.0, 50.0], 10.0)
    assert "(at once)" in sentence(7, [1.0], 5.0)


@pytest.mark.slow
def test_again_discards_at_once(cli):
    cli.inject("""
        import pathlib, time
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        def step(self, *args):
            if self.steps_done == 5:
                pathlib.Path('mark').touch()
                time.sleep(1000)
            return plain(self, *args)
        m.NativeEngine.step = step
    """)
    process = cli.start(*ENDLESS, "--ranks", "2", "--output", "run", "output.checkpoint_every=2")
    cli.wait_until((cli.folder / "mark").exists, process)
    ranks = cli.rank_processes("run")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    done = cli.finish(process, 130)
    assert gone(ranks)
    assert "is discarded" in done.stderr and "--resume" in done.stderr
    assert os.listdir(cli.folder / "run" / "checkpoints")[-1].startswith("step-")
