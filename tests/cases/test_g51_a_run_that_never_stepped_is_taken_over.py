"""G51: a start that ended before its first step leaves no dead end: same --output, or --resume with other keys."""

from __future__ import annotations

import json

import pytest

DATA = "data.train=texts.jsonl"
CURE = "data.bad_rows=skip"


def bad_data(cli) -> None:
    rows = [
        json.dumps({"text": f"The {n} for statement is used to iterate over the elements. " * 20}) for n in range(40)
    ]
    (cli.folder / "texts.jsonl").write_text("\n".join([*rows[:20], '{"text": broken', *rows[20:]]) + "\n")
    (cli.folder / "run").mkdir()  # made before, so the failed start does not remove it
    (cli.folder / "run" / "logs").mkdir()


def failed_start(cli) -> None:
    bad_data(cli)
    done = cli.run("train", "small.yaml", DATA, "--ranks", "1", "--output", "run", "train.steps=2", code=2)
    assert "bad_rows=skip" in done.stderr
    assert (cli.folder / "run" / "recipe.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["output", "resume"])
def test_after_bad_data(cli, way):
    failed_start(cli)
    if way == "output":
        cli.run("train", "small.yaml", DATA, CURE, "--ranks", "1", "--output", "run", "train.steps=2")
    else:
        cli.run("train", "--resume", "run", CURE)
    assert [e["step"] for e in cli.events("run", "step")] == [1, 2]
    assert "bad_rows: skip" in (cli.folder / "run" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_one_that_has_stepped_is_not(cli):
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=2")
    refused = cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", code=2)
    assert "holds a run already" in refused.stderr
    refused = cli.run("train", "--resume", "run", "data.sequence_tokens=32", code=2)
    assert "data.sequence_tokens was" in refused.stderr
