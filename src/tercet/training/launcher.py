"""Who started this rank, and what the launcher's own file asks for, from the environment that it leaves.

Sources: accelerate/utils/launch.py (ACCELERATE_*), torch/distributed/elastic (TORCHELASTIC_*),
deepspeed/launcher/launch.py (CROSS_RANK).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tercet.spec.strategy import Strategy


def launcher_name(environment: Mapping[str, str] = os.environ) -> str:
    if "ACCELERATE_MIXED_PRECISION" in environment:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if "CROSS_RANK" in environment:
        return "deepspeed"
    return "a launcher"


def how_started(launcher: str, devices: Sequence[str], hosts: Sequence[str]) -> str:
    """Return one line for the console: launcher, ranks and where each of them computes."""
    places = list(dict.fromkeys(devices))
    where = (
        f"{'each ' if len(devices) > 1 else ''}on the {places[0]}"
        if len(places) == 1
        else ", ".join(f"{n}: {d}" for n, d in enumerate(devices))
    )
    machines = sorted(set(hosts))
    if len(machines) > 1:
        where += f"; machines {', '.join(machines)}"
    return f"started by {launcher}: {len(devices)} rank{'s' if len(devices) > 1 else ''}, {where}"


def asked_by_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return recipe key -> value of what an Accelerate file with DeepSpeed asks for; empty when it does not."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return {}
    asked = {"strategy.engine": "deepspeed"}
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment:
        return asked  # a file of its own: deepspeed_file()
    names = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "strategy.zero",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "strategy.offload.optimizer",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "strategy.offload.weights",
    }
    asked |= {key: environment[name].lower() for name, key in names.items() if environment.get(name)}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        asked["train.precision"] = precision
    return asked


def deepspeed_file(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the DeepSpeed JSON that an Accelerate file names, or None."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return None
    return environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or None


def contradictions(asked: Mapping[str, str], strategy: Strategy, precision: str) -> dict[str, tuple[str, str]]:
    """Return key -> (the launcher's value, the recipe's) where they differ. A recipe's engine need not be DeepSpeed."""
    ours = {
        "strategy.engine": strategy.engine,
        "strategy.zero": str(strategy.zero),
        "strategy.offload.optimizer": strategy.offload_optimizer,
        "strategy.offload.weights": strategy.offload_weights,
        "train.precision": precision,
    }
    return {key: (value, ours[key]) for key, value in asked.items() if value != ours[key]}
