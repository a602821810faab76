"""A wheel in an empty environment: it plans without torch, says what training lacks, and holds its schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: str | Path, code: int = 0, **more) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=280, check=False, env=environment, **more
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    (found,) = folder.glob("tercet-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_what_is_not_code(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "py.typed",
        "spec/gpus.toml",
        "spec/recipe.schema.json",
        "recipes/first-light.yaml",
        "report/page.html",
    ):
        assert f"tercet/{name}" in names
    assert not [n for n in names if n.startswith("tests")]


@pytest.mark.slow
def test_it_plans_without_torch_and_says_what_training_needs(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python, tercet = tmp_path / "venv/bin/python", tmp_path / "venv/bin/tercet"
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    packages = {p["name"] for p in json.loads(call(python, "-m", "pip", "list", "--format", "json"))}
    assert not packages & {"torch", "transformers", "tokenizers", "pyarrow", "numpy"}
    assert "prepare" in call(tercet, "--help", cwd=tmp_path)
    assert "zero1" in call(tercet, "plan", "first-light", "--gpus", "3x4090", cwd=tmp_path)
    assert json.loads(call(tercet, "plan", "deepseek-llm-7b", "--gpus", "8xH100 SXM", "--json", cwd=tmp_path))
    for command in (["train", "first-light"], ["prepare", "first-light"], ["generate", ".", "y"], ["doctor"]):
        said = call(tercet, *command, code=2, cwd=tmp_path)
        assert "tercet[train]" in said and "fault of Tercet" not in said
    assert not (tmp_path / "runs").exists()
