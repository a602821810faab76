"""Where a DeepSpeed JSON and a recipe say different things: each key with both values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tercet.spec.recipe import Recipe
from tercet.spec.strategy import Strategy

# type of DeepSpeed's scheduler -> optim.schedule (deepspeed/runtime/lr_schedules.py)
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw"}  # DeepSpeed's Adam decays as AdamW unless told not to


@dataclass(frozen=True)
class Conflict:
    """`file_key` is `theirs` in the file; `recipe_key` is `ours` in the recipe."""

    file_key: str
    theirs: Any
    recipe_key: str
    ours: Any

    def __str__(self) -> str:
        return f"{self.file_key} is {self.theirs} in the file, {self.recipe_key} is {self.ours} in the recipe"

    @property
    def override(self) -> str:
        """What would make the recipe follow the file; "" for what follows from other keys."""
        return "" if self.recipe_key == "accumulation" else f"{self.recipe_key}={self.theirs}"


def conflicts(content: dict[str, Any], recipe: Recipe, strategy: Strategy | None = None) -> list[Conflict]:
    """Return every key of a DeepSpeed configuration that the recipe contradicts; "auto" contradicts nothing.

    Without a strategy, what the recipe leaves open is not compared.
    """
    ours = {**_open_parts(recipe, strategy), **_fixed_parts(recipe)}
    found = []
    for file_key, recipe_key, theirs in _asked(content):
        own = ours.get(recipe_key)
        if theirs is not None and theirs != "auto" and own is not None and not _same(theirs, own):
            found.append(Conflict(file_key, theirs, recipe_key, own))
    return found


def _same(theirs: Any, ours: Any) -> bool:
    try:
        return float(theirs) == float(ours)
    except (TypeError, ValueError):
        return str(theirs).lower() == str(ours).lower()


def _fixed_parts(recipe: Recipe) -> dict[str, Any]:
    optim, train = recipe.optim, recipe.train
    return {
        "optim.name": optim.name,
        "optim.lr": optim.lr,
        "optim.betas": list(optim.betas),
        "optim.eps": optim.eps,
        "optim.weight_decay": optim.weight_decay,
        "optim.clip": optim.clip,
        "optim.schedule": optim.schedule,
        "optim.warmup_steps": optim.warmup_steps,
        "train.batch_sequences": train.batch_sequences,
        "train.precision": train.precision,
        "train.steps": train.steps,
    }


def _open_parts(recipe: Recipe, strategy: Strategy | None) -> dict[str, Any]:
    if strategy is not None:
        return {
            "strategy.zero": strategy.zero,
            "strategy.offload.optimizer": strategy.offload_optimizer,
            "strategy.offload.weights": strategy.offload_weights,
            "strategy.micro_batch": strategy.micro_batch,
            "accumulation": strategy.accumulation(recipe.train.batch_sequences),
        }
    section = recipe.strategy
    given = {
        "strategy.zero": section.zero,
        "strategy.offload.optimizer": section.offload.optimizer if section.offload.model_fields_set else None,
        "strategy.offload.weights": section.offload.weights if section.offload.model_fields_set else None,
        "strategy.micro_batch": section.micro_batch,
    }
    return {key: value for key, value in given.items() if value != "auto"}


def _asked(content: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return (key in the file, key of the recipe, value) of everything that both can say."""
    zero, optimizer, scheduler = (_section(content, k) for k in ("zero_optimization", "optimizer", "scheduler"))
    own, plan = _section(optimizer, "params"), _section(scheduler, "params")
    clip = content.get("gradient_clipping")
    kind = str(scheduler.get("type", "")).lower()
    found = [
        ("zero_optimization.stage", "strategy.zero", zero.get("stage")),
        ("gradient_clipping", "optim.clip", "none" if clip in (0, 0.0) else clip),
        ("train_batch_size", "train.batch_sequences", content.get("train_batch_size")),
        (
            "train_micro_batch_size_per_gpu",
            "strategy.micro_batch",
            content.get("train_micro_batch_size_per_gpu"),
        ),
        ("gradient_accumulation_steps", "accumulation", content.get("gradient_accumulation_steps")),
        ("scheduler.type", "optim.schedule", SCHEDULES.get(kind, scheduler.get("type"))),
        ("scheduler.params.warmup_max_lr", "optim.lr", plan.get("warmup_max_lr")),
        ("scheduler.params.warmup_num_steps", "optim.warmup_steps", plan.get("warmup_num_steps")),
        ("scheduler.params.total_num_steps", "train.steps", plan.get("total_num_steps")),
        ("optimizer.type", "optim.name", _optimizer(optimizer.get("type"))),
    ]
    found += [(f"optimizer.params.{k}", f"optim.{k}", own.get(k)) for k in ("lr", "betas", "eps", "weight_decay")]
    for name, key in (("offload_optimizer", "optimizer"), ("offload_param", "weights")):
        if isinstance(zero.get(name), dict):
            found.append(
                (f"zero_optimization.{name}.device", f"strategy.offload.{key}", zero[name].get("device") or "none")
            )
    return found + _precision(content)


def _precision(content: dict[str, Any]) -> list[tuple[str, str, Any]]:
    on = {k: _section(content, k).get("enabled") for k in ("bf16", "bfloat16", "fp16")}
    return [
        (f"{key}.enabled", "train.precision", "bf16" if key.startswith("b") else "fp16")
        for key, value in on.items()
        if value is True
    ]


def _optimizer(name: Any) -> Any:
    return OPTIMIZERS.get(str(name).lower(), name) if name is not None else None


def _section(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}
