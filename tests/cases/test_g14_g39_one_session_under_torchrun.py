"""G14, G39: under torchrun a run is checked, refused, resumed and its cards tested as under tercet train."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from tests.cli import LIMIT_SECONDS, Cli

pytestmark = pytest.mark.slow
SHORT = ("train.steps=3", "train.evaluate_every=0", "output.checkpoint_every=0", "train.sample_prompts=[]")


def torchrun(cli: Cli, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tercet", "train")
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.fixture
def run(cli):
    done = torchrun(cli, "small.yaml", "--ranks", "2", "--output", "run", *SHORT)
    assert done.returncode == 0, done.stderr
    return cli.folder / "run"


def test_a_finished_run_is_left_alone_and_shown(cli, run):
    model = run / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns, model.read_bytes()
    done = torchrun(cli, "--resume", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing to resume") == 1
    assert "train.steps=6" in done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["finished"] is True
    assert (model.stat().st_mtime_ns, model.read_bytes()) == before


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--ranks", "3"), "--ranks 3, but torchrun has started 2"),
        (("--restarts", "1"), "torchrun holds the processes"),
    ],
)
def test_what_cannot_hold_is_refused(cli, option, says):
    done = torchrun(cli, "small.yaml", "--output", "run", *option, *SHORT)
    assert done.returncode != 0
    assert done.stderr.count(says) == 1
    assert "Traceback (most recent call last)" not in done.stderr.split(says)[0]
    assert not (cli.folder / "run").exists()


def test_cards_are_tested_and_what_they_need_reaches_every_rank(cli):
    place = cli.folder / "inject"
    place.mkdir()
    code = """
        import os, pathlib, sys
        if 'RANK' in os.environ:
            import tercet.probe.selftest as s
            import tercet.training.run as r
            s.detect_gpus = lambda: [{'name': 'RTX 4090', 'driver_version': '1'}] * 2
            s.find_working_environment = lambda attempt, say: say('peer access was tested') or {'NCCL_P2P_DISABLE': '1'}
            s.remembered, s.remember = dict, lambda found: None
            plain = r.run_rank
            def seen(*args, **kwargs):
                pathlib.Path('seen-' + os.environ['RANK']).write_text(os.environ.get('NCCL_P2P_DISABLE', ''))
                return plain(*args, **kwargs)
            r.run_rank = seen
    """
    (place / "sitecustomize.py").write_text(textwrap.dedent(code))
    cli.environment["PYTHONPATH"] = str(place)
    done = torchrun(cli, "small.yaml", "--output", "run", *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("peer access was tested") == 1
    assert [(cli.folder / f"seen-{rank}").read_text() for rank in range(2)] == ["1", "1"]
