"""tercet report RUN [--json]."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.run_folders import FakeRun, finished


def tercet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "tercet", *arguments],
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_it_writes_the_page_and_prints_the_figures_beside_the_plan(tmp_path):
    fake = finished(tmp_path / "run")
    done = tercet("report", str(fake.run.path), COLUMNS="120")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert fake.run.report.read_text().startswith("<!doctype html>")
    for text in (
        "small · finished",
        "Validation loss",
        "2.0000",
        "7.389",
        "predicted",
        "measured",
        "+33.3 %",
        "exact",
    ):
        assert text in out, text
    assert str(fake.run.report) in out.replace("\n", "")


def test_json_holds_everything_as_data(tmp_path):
    fake = finished(tmp_path / "run")
    fake.event("sample", step=4, prompt="列表", text="推导式")
    done = tercet("report", str(fake.run.path), "--json", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.decode("utf-8"))
    assert content["state"] == "finished"
    assert content["headline"]["validation_loss"] == 2.0
    assert content["samples"][-1]["text"] == "推导式"
    assert content["checkpoints"][0]["best"] is True
    rows = {(row["group"], row["what"]): row for row in content["compared"]}
    assert rows["at the peak", "activations"]["measured"] is None
    assert rows["time", "tokens per second"]["error"] == pytest.approx(1 / 3)


def test_a_console_without_the_characters_does_not_stop_it(tmp_path):
    done = tercet("report", str(finished(tmp_path / "run").run.path), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr


def test_bad_folders_are_one_clear_error(tmp_path):
    missing = tercet("report", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert b"is not a run folder: it has no recipe.yaml" in missing.stderr
    fake = FakeRun(tmp_path / "run")
    fake.run.plan.write_text("{")
    damaged = tercet("report", str(fake.run.path))
    assert damaged.returncode == 2
    assert b"plan.json cannot be read" in damaged.stderr
    assert b"Traceback" not in damaged.stderr
    assert not fake.run.report.exists()


def test_the_report_room_loads_no_torch():
    code = (
        "import sys, tercet.report.page, tercet.report.compare, tercet.cli.report\n"
        "heavy = {'torch', 'transformers', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
