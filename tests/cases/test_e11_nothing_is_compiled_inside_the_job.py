"""E11: an offloaded run compiles nothing: no compiler, no ninja, no CUDA_HOME, and it works; what is missing is told."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tercet.engine.deepspeed.installed import require_deepspeed
from tercet.errors import InputError
from tercet.spec.recipe import build_recipe
from tercet.spec.strategy import Work, not_built, resolve, why_not
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_model


def train_without_tools(world, folder: str):
    before = dict(os.environ)
    os.environ.update(PATH=folder, XDG_CACHE_HOME=folder, TORCH_EXTENSIONS_DIR=folder)
    for name in ("CUDA_HOME", "CXX"):
        os.environ.pop(name, None)
    try:
        engine = engine_of(world, layout("zero2-cpu", world.size, 4), 4, "bf16")
        losses = [engine.step(micro_batches(s, world.rank, world.size, 1, 4), 1e-2).loss for s in range(3)]
        return losses, type(engine.fragments.base).__name__, engine.config["optimizer"]["params"]
    finally:
        os.environ.clear()
        os.environ.update(before)


@needs_deepspeed
def test_an_offloaded_run_needs_no_compiler(pools, tmp_path):
    for losses, optimizer, parameters in pools[2].run(train_without_tools, str(tmp_path)):
        assert losses[-1] < losses[0]
        assert optimizer == "AdamW" and parameters["torch_adam"] and parameters["fused"]
    assert not list(tmp_path.rglob("*")), "something was compiled"


def test_without_deepspeed_the_way_to_install_it_is_told(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else real(name, *a))
    with pytest.raises(InputError, match="not installed") as caught:
        require_deepspeed()
    assert 'pip install "tercet[deepspeed]"' in str(caught.value)


def recipe_with(**strategy):
    return build_recipe({"data": {"train": "x"}, "strategy": strategy})


def test_nvme_needs_deepspeed_and_stage_3():
    """Its library is built before the ranks start (tests/unit/test_async_io.py)."""
    offload = {"optimizer": "nvme"}
    assert "deepspeed (zero 3); cpu is for both" in not_built(recipe_with(engine="native", offload=offload))[0]
    recipe = recipe_with(engine="deepspeed", offload=offload)
    assert not_built(recipe) == [] and resolve(recipe.strategy, 3, Work(16, 12)).zero == 3
    two = resolve(recipe_with(engine="deepspeed", zero=2, offload=offload).strategy, 3, Work(16, 12))
    assert any("nvme needs zero 3, and zero is 2" in sentence for sentence in why_not(tiny_model(), two, Work(16, 12)))
