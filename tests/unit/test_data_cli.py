"""tercet prepare: what it prints."""

from __future__ import annotations

import json

import pytest
from tests.texts import sentence, write_rows
from typer.testing import CliRunner

from tercet.cli import app


@pytest.fixture
def recipe(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [sentence(n, 14) for n in range(12)])
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: {layers: 1, width: 8, heads: 1, ffn: 8, vocabulary: 259}\n"
        f"data: {{train: {data}, validation: 0.25, tokenizer: train, sequence_tokens: 128, cache: {tmp_path}/c}}\n"
    )
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)], catch_exceptions=False)


def test_the_figures_and_the_samples(recipe):
    out = run(recipe, "--show", "2").stdout
    assert "12 read = 9 to train + 3 held out + 0 dropped" in out
    assert "0 held-out rows also occur in training" in out
    assert "== document 1: " in out and "== document 2: " in out and "== document 3" not in out
    # The start is read but never predicted; the end is predicted.
    assert out.count("[-<|begin_of_text|>-]Text ") == 2
    assert out.count(".<|end_of_text|>\n") == 2


def test_overrides_and_json(recipe):
    found = json.loads(run(recipe, "data.sequence_tokens=256", "--json").stdout)
    assert found["sequence_tokens"] == 256 and found["hit"] is False
    assert found["rows"] == {"read": 12, "train": 9, "validation": 3, "dropped": 0}
    assert json.loads(run(recipe, "data.sequence_tokens=256", "--json").stdout)["hit"] is True
