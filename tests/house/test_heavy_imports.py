"""What must answer at once loads neither torch nor transformers: help, plan, report, the package itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.argv = ["tercet"] + {arguments!r}
from tercet.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (None, 0, 3), end.code  # 3: nothing fits, which is an answer too
heavy = [m for m in ("torch", "transformers", "tokenizers", "pyarrow", "plotly", "tensorboard") if m in sys.modules]
print("HEAVY", heavy)
print("COMMANDS", [m for m in sys.modules if m.startswith("tercet.cli.")])
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["plan", "first-light"], ["plan", "deepseek-llm-7b", "--gpus", "3x4090"]],
)
def test_no_heavy_import(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    if not arguments[0].startswith("-"):  # help names them all
        assert f"COMMANDS ['tercet.cli.{arguments[0]}']" in done.stdout


def test_a_rank_that_shards_nothing_does_not_load_what_shards():
    """Half of a second of processor time for each rank of each run; both lie behind harmless names."""
    code = "import tercet.training.rank, tercet.training.run, tercet.engine.native, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "'torch.nn'" in done.stdout
    assert "torch.distributed.fsdp" not in done.stdout and "torch.distributed.tensor'" not in done.stdout


def test_importing_the_package_is_light():
    code = "import sys, tercet; print([m for m in ('torch', 'pydantic', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_not_there_is_said_before_torch_loads(tmp_path):
    """One process for all commands that take a model, a run or a file: it ends without torch."""
    code = """
import sys
from typer.testing import CliRunner
from tercet.cli import app
from tercet.errors import InputError
for line in ["generate nothere hi", "generate . --file nothere", "chat nothere", "serve nothere", "evaluate nothere",
             "evaluate . --data nothere", "export nothere --output x", "fetch ./nothere", "report nothere",
             "watch nothere", "calibrate nothere", "train --resume nothere", "train nothere.yaml", "bench nothere",
             "prepare nothere", "plan nothere.yaml", "rehearse nothere --gpus 1x4090", "init nothere"]:
    error = CliRunner().invoke(app, line.split()).exception
    assert isinstance(error, InputError) and "nothere" in str(error), (line, error)
print("HEAVY", [m for m in ("torch", "transformers") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=tmp_path, check=False
    )
    assert done.stdout.strip() == "HEAVY []", done.stdout + done.stderr
