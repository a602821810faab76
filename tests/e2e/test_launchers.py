"""accelerate launch, torchrun and deepspeed start the ranks: each run says who did, and what its file asks for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tercet.spec.strategy import Strategy
from tercet.training.launcher import asked_by_launcher, contradictions, how_started, launcher_name
from tests.cli import LIMIT_SECONDS, Cli

ROOT = Path(__file__).parents[2]
needs_both = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("deepspeed", "accelerate")),
    reason="DeepSpeed and Accelerate are not both installed (pip install tercet[deepspeed])",
)
# A published set-up's file: no distributed_type, keys of a DeepSpeed JSON in Accelerate's section, fp16 twice.
PUBLISHED = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
  zero_stage: 3
  allgather_partitions: true
  allgather_bucket_size: 500000000
  reduce_scatter: true
  overlap_comm: true
  load_from_fp32_weights: true
fp16: true
mixed_precision: fp16
num_processes: 3
"""
TINY = ("train.steps=3", "train.evaluate_every=0", "output.checkpoint_every=0", "train.sample_prompts=[]")


def launch(cli: Cli, *command: str, code: int = 0) -> str:
    """Run a launcher of this Python in the folder; return what it printed."""
    script = Path(sys.executable).with_name(command[0])
    environment = {
        **cli.environment,
        "PATH": f"{script.parent}{os.pathsep}{cli.environment['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [str(script), *command[1:]],
        cwd=cli.folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, _ = process.communicate()
        raise AssertionError(f"no end within {LIMIT_SECONDS} s\n{out}") from None
    assert process.returncode == code, f"exit {process.returncode}\n{out}"
    return out


@needs_both
@pytest.mark.slow
def test_accelerate_with_the_published_file_made_whole(cli):
    (cli.folder / "published.yaml").write_text(PUBLISHED)
    refused = launch(
        cli, "accelerate", "launch", "--config_file", "published.yaml", "-m", "tercet", "--version", code=1
    )
    assert "distributed_type" in refused
    said = cli.run("plan", "--accelerate-config", "published.yaml", "--write", "fixed.yaml").stdout
    (command,) = [line for line in said.splitlines() if "accelerate launch --config_file fixed.yaml" in line]
    assert command.endswith("tercet train RECIPE strategy.engine=deepspeed strategy.zero=3 train.precision=fp16")
    said = " ".join(said.split())
    assert "add distributed_type: DEEPSPEED" in said
    assert "dead: deepspeed_config.load_from_fp32_weights" in said
    assert "strategy.engine=deepspeed strategy.zero=3" in said
    out = launch(
        cli,
        "accelerate",
        "launch",
        "--config_file",
        "fixed.yaml",
        "-m",
        "tercet",
        "train",
        "small.yaml",
        "strategy.engine=deepspeed",
        "strategy.zero=3",
        "train.precision=bf16",
        *TINY,
        "--output",
        "run",
    )
    assert "started by accelerate launch: 3 ranks, each on the cpu" in out
    assert "mixed_precision is fp16 in the launcher's file; the recipe counts: train.precision is bf16" in out
    assert "deepspeed-zero3 on 3 ranks" in out
    assert len(cli.losses("run")) == 3
    assert (cli.folder / "run" / "model" / "model.safetensors").is_file()
    again = cli.run("plan", "--accelerate-config", "published.yaml", "--write", "fixed.yaml", code=2)
    assert "exists already" in again.stderr


@needs_both
@pytest.mark.slow
def test_deepspeeds_own_launcher(cli):
    # It puts --local_rank before the command unless told not to, and counts a CPU machine as it likes.
    out = launch(
        cli,
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        "29517",
        "--module",
        "tercet",
        "train",
        "small.yaml",
        "strategy.engine=deepspeed",
        "strategy.zero=2",
        *TINY,
        "--output",
        "run",
    )
    assert "started by deepspeed: 2 ranks, each on the cpu" in out
    assert len(cli.losses("run")) == 3


@pytest.mark.parametrize("name", ["deepspeed_zero3", "deepspeed_zero2_offload"])
def test_shipped_files_agree_with_the_shipped_recipes(name):
    """What Accelerate would hand to the ranks contradicts nothing in the recipe that the file's header names."""
    from tercet.spec.recipe import load_recipe
    from tercet.spec.strategy import Work, resolve

    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    recipe_name = next(
        w for line in text.splitlines() if "-m tercet train" in line for w in line.split() if w.startswith("three-")
    )
    content = yaml.safe_load(text)
    recipe = load_recipe(recipe_name)
    work = Work.of(recipe)
    strategy = resolve(recipe.strategy, content["num_processes"], work)
    section = content["deepspeed_config"]
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": content["mixed_precision"],
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(section["zero_stage"]),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": section["offload_optimizer_device"],
    }
    assert contradictions(asked_by_launcher(environment), strategy, recipe.train.precision) == {}
    assert section["gradient_accumulation_steps"] == strategy.accumulation(work.batch_sequences)
    assert content["distributed_type"] == "DEEPSPEED"


def test_contradictions_name_both_values():
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    asked = asked_by_launcher(environment)
    found = contradictions(asked, Strategy(engine="deepspeed", zero=2, ranks=3), "bf16")
    assert found == {"strategy.zero": ("3", "2")}
    assert contradictions(asked, Strategy(zero=3, ranks=3), "bf16") == {"strategy.engine": ("deepspeed", "native")}
    assert asked_by_launcher({}) == {}


def test_how_a_run_was_started():
    assert launcher_name({"TORCHELASTIC_RUN_ID": "x"}) == "torchrun"
    assert launcher_name({"TORCHELASTIC_RUN_ID": "x", "ACCELERATE_MIXED_PRECISION": "no"}) == "accelerate launch"
    assert launcher_name({"CROSS_RANK": "0"}) == "deepspeed"
    text = how_started(launcher_name({}), ["cuda:0", "cuda:1"], ["a", "a"])
    assert text == "started by a launcher: 2 ranks, 0: cuda:0, 1: cuda:1"
    assert how_started("torchrun", ["cpu"], ["a"]) == "started by torchrun: 1 rank, on the cpu"


def test_tercet_train_says_who_started_what(finished):
    cli, _ = finished
    assert "started by tercet train: 3 ranks, each on the cpu" in (cli.folder / "errors.txt").read_text()
