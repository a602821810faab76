"""tercet plan and tercet doctor as commands: what they print and with which exit code they leave."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def tercet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "tercet", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_json_on_stdout():
    run = tercet("plan", "llama-1.2b-32k", "--gpus", "3x4090", "--json")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["strategies"][0]["tokens_per_second"] > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan", "deepseek-llm-7b", "--gpus", "3x4090", "strategy=zero3"), 3, "Way out: "),
        (("plan", "deepseek-lm-7b"), 2, "deepseek-llm-7b"),
        (("plan",), 2, "deepseek-llm-7b --gpus"),
        (("plan", "first-light", "train.step=3"), 2, "train.steps"),
        (("plan", "--deepspeed-config", "no-such.json"), 2, "no-such.json"),
    ],
)
def test_exit_codes(arguments, code, words):
    run = tercet(*arguments)
    assert run.returncode == code
    assert words in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_a_file_alone_is_only_read(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    run = tercet("plan", "--deepspeed-config", str(file))
    assert run.returncode == 0 and "overlap_comm" in run.stdout


def test_doctor_looks_and_leaves_nothing_when_quick(tmp_path):
    run = tercet("doctor", "--quick", "--json", XDG_CONFIG_HOME=str(tmp_path))
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["inventory"]["host_bytes"] > 2**30 and report["rates"] == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_doctor_measures_and_plan_uses_it(tmp_path):
    run = tercet("doctor", "--ranks", "2", "--json", XDG_CONFIG_HOME=str(tmp_path))
    report = json.loads(run.stdout)
    assert report["rates"]["matmul_fp32"] > 1e9 and report["rates"]["all_reduce"] > 1e6
    if not report["inventory"]["cards"]:
        answer = json.loads(tercet("plan", "first-light", "--json", XDG_CONFIG_HOME=str(tmp_path)).stdout)
        assert answer["strategies"][0]["tokens_per_second"] > 10
