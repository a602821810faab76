"""G42: a random.py, queue.py or tokenizers/ in the working directory is imported by no process of ours."""

from __future__ import annotations

import os
import sys

import pytest

from tercet import children
from tercet.data.encoders import Encoders, TextJob
from tercet.data.tokenizer import Tokenizer

NAMES = ("random.py", "queue.py", "tokenizers/__init__.py", "numpy/__init__.py", "sitecustomize_own.py", "yaml.py")


def strangers(folder) -> None:
    """Lay modules into a folder that leave a mark when they are imported, and do not work."""
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"open({str(folder / 'imported')!r}, 'a').write({name!r} + '\\n')\nraise SystemExit('a stranger')\n"
        )


def nothing_of(cli) -> None:
    mark = cli.folder / "imported"
    assert not mark.exists(), mark.read_text()


def test_a_command_alone(cli):
    strangers(cli.folder)
    assert "sequences" in cli.run("prepare", "small.yaml").stdout
    nothing_of(cli)


@pytest.mark.slow
def test_a_whole_run_although_an_empty_entry_of_pythonpath_means_the_working_directory(cli):
    strangers(cli.folder)
    cli.environment["PYTHONPATH"] = os.pathsep + str(cli.folder / "nothing")
    process = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=3")
    nothing_of(cli)
    assert "3 steps" in process.stdout
    cli.run("generate", "run", "The", "--tokens", "2")
    nothing_of(cli)


def test_helpers_of_the_tokenizer(tmp_path, monkeypatch):
    strangers(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with Encoders(TextJob(byte_tokenizer()), 10_000_000) as encoders:
        assert encoders.count > 1  # helpers are there
        for _ in range(2 * encoders.count):
            assert len(encoders.submit(["some text"]).result()) == 1
    assert not (tmp_path / "imported").exists()


def byte_tokenizer() -> Tokenizer:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend, len(alphabet), None, None)


def test_every_child_of_ours_is_started_by_one_rule(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}.{os.pathsep}/kept")
    assert children.environment({"A": "1"}).items() >= {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/kept", "A": "1"}.items()
    assert children.command("m", "x") == [sys.executable, "-P", "-m", "m", "x"]
