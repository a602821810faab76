"""Small DeepSpeed engines for tests; everything that needs DeepSpeed is skipped, with the reason, without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tercet.engine import Engine, EngineSetup, open_engine
from tercet.spec.model import Model
from tercet.spec.recipe import OptimSection, StrategySection
from tercet.spec.strategy import Strategy, Work, resolve
from tests.tiny import tiny_model

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install tercet[deepspeed])"
)
CPU_OPTIMIZER = {"offload": {"optimizer": "cpu"}}
CPU_BOTH = {"offload": {"optimizer": "cpu", "weights": "cpu"}}
NVME_OPTIMIZER = {"offload": {"optimizer": "nvme"}}
NVME_BOTH = {"offload": {"optimizer": "nvme", "weights": "nvme"}}
NVME_WEIGHTS = {"offload": {"optimizer": "cpu", "weights": "nvme"}}
LAYOUTS = {
    "zero0": {"zero": 0},
    "zero3-nvme": {"zero": 3, **NVME_OPTIMIZER},
    "zero3-nvme-both": {"zero": 3, **NVME_BOTH},
    "zero3-nvme-weights": {"zero": 3, **NVME_WEIGHTS},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero2-cpu": {"zero": 2, **CPU_OPTIMIZER},
    "zero3-cpu": {"zero": 3, **CPU_OPTIMIZER},
    "zero3-weights": {"zero": 3, **CPU_BOTH},
}


def layout(name: str, ranks: int, batch: int, micro_batch: int = 1, tokens: int = 16, **keys: Any) -> Strategy:
    """Return a DeepSpeed strategy by its name in LAYOUTS; `native-` before it asks for the native engine."""
    engine = "native" if name.startswith("native-") else "deepspeed"
    section = {"engine": engine, "micro_batch": micro_batch, **LAYOUTS[name.removeprefix("native-")], **keys}
    return resolve(StrategySection.model_validate(section), ranks, Work(tokens, batch))


def engine_of(
    world: Any,
    strategy: Strategy,
    batch: int,
    precision: str = "fp32",
    model: Model | None = None,
    swap: Path | None = None,
    **optim: Any,
) -> Engine:
    """As tests.tiny.tiny_engine, by way of open_engine."""
    section = OptimSection(**{"lr": 1e-2, "clip": 0.5, "eps": 1e-3, **optim})
    model = model or tiny_model()
    return open_engine(
        EngineSetup(model, strategy, section, precision, world, seed=7, batch_sequences=batch, swap=swap)
    )
