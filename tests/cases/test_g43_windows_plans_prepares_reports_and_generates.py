"""G43: where Unix's modules are missing, plan, prepare, report and generate work; training says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = str(Path(__file__).with_name("windows.py"))


def on_windows(cli, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, STAND_IN, *arguments],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr and "fault of Tercet" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "small.yaml", "--gpus", "3x4090"), "zero1"),
        (("prepare", "small.yaml", "data.cache=windows-cache"), "folder"),
        (("report", "RUN", "--output", "page.html"), "validation loss"),
        (("generate", "RUN", "The", "--tokens", "3"), "The"),
        (("--help",), "prepare"),
    ],
)
def test_what_works(finished, arguments, words):
    cli, run = finished
    done = on_windows(cli, *(run if a == "RUN" else a for a in arguments))
    assert done.returncode == 0, done.stderr
    assert words in done.stdout.lower() or words in done.stdout


@pytest.mark.parametrize("arguments", [("small.yaml", "--output", "new"), ("--resume", "RUN", "train.steps=40")])
def test_training_says_what_it_needs(finished, arguments):
    cli, run = finished
    done = on_windows(cli, "train", *(run if a == "RUN" else a for a in arguments))
    assert done.returncode == 2
    assert "WSL" in done.stderr and "plan, prepare, report and generate work" in done.stderr
    assert not (cli.folder / "new").exists()
