"""G59: a DeepSpeed file that accelerate hands over is compared with the recipe, each key with both values."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tercet.errors import InputError
from tercet.planner.launcher_files.conflicts import conflicts
from tercet.spec.recipe import build_recipe
from tercet.spec.strategy import Work, resolve
from tercet.training.launched import _compare_with_launcher
from tests.e2e.test_launchers import launch

FILE = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 7,
    "train_batch_size": 28,
    "train_micro_batch_size_per_gpu": 2,
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-5, "warmup_num_steps": 10}},
}
RECIPE = {
    "model": {"layers": "2", "width": "64", "heads": "4", "ffn": "96", "vocabulary": "300"},
    "data": {"train": "x.txt", "sequence_tokens": "64"},
    "strategy": "zero2",
    "train": {"batch_sequences": "12", "steps": "3", "precision": "bf16"},
}
BOTH = (
    ("zero_optimization.stage is 3", "strategy.zero is 2"),
    ("zero_optimization.offload_optimizer.device is cpu", "strategy.offload.optimizer is none"),
    ("gradient_clipping is 0.5", "optim.clip is 1.0"),
    ("gradient_accumulation_steps is 7", "accumulation is "),
    ("train_batch_size is 28", "train.batch_sequences is 12"),
    ("fp16.enabled is fp16", "train.precision is bf16"),
    ("optimizer.params.lr is 5e-05", "optim.lr is 0.0003"),
    ("optimizer.params.betas is [0.9, 0.999]", "optim.betas is [0.9, 0.95]"),
    ("optimizer.params.eps is 1e-06", "optim.eps is 1e-08"),
    ("optimizer.params.weight_decay is 0.0", "optim.weight_decay is 0.1"),
    ("scheduler.type is constant", "optim.schedule is cosine"),
    ("scheduler.params.warmup_num_steps is 10", "optim.warmup_steps is 0"),
)


def strategy_of(recipe):
    return resolve(recipe.strategy, 2, Work.of(recipe))


def test_each_key_with_both_values():
    recipe = build_recipe(RECIPE)
    said = "\n".join(map(str, conflicts(FILE, recipe, strategy_of(recipe))))
    for theirs, ours in BOTH:
        (line,) = [line for line in said.splitlines() if line.startswith(theirs)]
        assert ours in line


def test_auto_and_agreement_contradict_nothing():
    recipe = build_recipe(RECIPE)
    auto = {
        "zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "optimizer": {"params": {"lr": "auto"}},
    }  # fmt: skip
    assert conflicts(auto, recipe, strategy_of(recipe)) == []
    agreed = {"gradient_clipping": 1, "train_batch_size": 12, "bf16": {"enabled": True}}
    assert conflicts(agreed, recipe, strategy_of(recipe)) == []
    off = build_recipe({**RECIPE, "optim": {"clip": "none"}})
    assert conflicts({"gradient_clipping": 0.0}, off) == []


def test_the_override_that_follows_the_file_can_be_pasted(tmp_path, monkeypatch):
    """A shell hands over each key whole, brackets and spaces too; with them nothing is left to contradict."""
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    recipe = build_recipe(RECIPE)
    session = SimpleNamespace(recipe=recipe, plan={"strategy": asdict(strategy_of(recipe))}, say=print)
    with pytest.raises(InputError) as refused:
        _compare_with_launcher(session)
    keys = shlex.split(refused.value.hint.partition("with: ")[2])
    assert "optim.betas=[0.9, 0.999]" in keys
    followed = build_recipe(RECIPE, keys)
    assert followed.optim.betas == (0.9, 0.999) and followed.strategy.engine == "deepspeed"
    assert conflicts(FILE, followed, strategy_of(followed)) == []


def test_plan_lists_the_conflicts(cli):
    (cli.folder / "ds.json").write_text(json.dumps(FILE))
    out = cli.run("plan", "small.yaml", "strategy=zero2", "--ranks", "2", "--deepspeed-config", "ds.json").stdout
    for words in ("gradient_clipping is 0.5", "optimizer.params.lr is 5e-05", "train_batch_size is 28", "fp16.enabled"):
        assert any("conflict" in line and words in line for line in out.splitlines()), words
    assert "optim.clip is 1.0" in out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_accelerate_launch_is_refused_before_anything_is_made(cli):
    (cli.folder / "ds.json").write_text(json.dumps(FILE))
    (cli.folder / "acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: true\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n"
    )
    command = ("accelerate", "launch", "--config_file", "acc.yaml", "-m", "tercet", "train", "small.yaml")
    out = launch(cli, *command, "strategy=zero2", "--output", "run", code=1)
    for words in ("gradient_clipping is 0.5", "optim.clip is 1.0", "zero_optimization.stage is 3", "optim.clip=0.5"):
        assert words in out
    assert out.count("gradient_clipping is 0.5") == 1, "told once, not once a rank"
    assert not (cli.folder / "run").exists()
