"""The command that runs a plan's first choice as it stands: `tercet train …` with every key that decides it."""

from __future__ import annotations

import shlex
from typing import Any

from tercet.planner.answer import is_recipe
from tercet.spec.families import HUB, hub_name, presets
from tercet.spec.recipe import load_recipe, shipped_recipes
from tercet.spec.strategy import Strategy, Work

ANY_MODEL = "any-text"  # the shipped recipe that a bare model is trained with
NO_WEIGHTS = "FOLDER"  # where an adapter would stand on random weights, which is refused: a note of the plan says so


def train_command(name: str, overrides: list[str], answer: dict[str, Any]) -> str | None:
    """Return the line for the best strategy of `tercet plan NAME overrides`, or None when nothing fits."""
    if not answer["strategies"]:
        return None
    best = Strategy(**answer["strategies"][0]["strategy"])
    kept = [o for o in overrides if o.partition("=")[0].strip().partition(".")[0] != "strategy"]
    if is_recipe(name):
        words = ["tercet", "train", str(name), *kept]
        recipe = load_recipe(name, overrides)
        if recipe.adapter.kind != "none" and not recipe.model.pretrained:
            words.append(f"model={NO_WEIGHTS}")
        path, stated = recipe.strategy.offload.nvme_path, Work.of(recipe)
    elif adapter_recipe := recipe_with_adapter(name, kept):
        shipped, kept = adapter_recipe
        words = ["tercet", "train", shipped, "data.train=YOUR.jsonl", *kept]
        path, stated = None, Work.of(load_recipe(shipped))
    else:
        words = ["tercet", "train", ANY_MODEL, f"model={with_weights(name, kept)}", *kept]
        path, stated = None, Work(0, 0)
    given = {o.partition("=")[0].strip() for o in kept}
    for key, attribute in (("data.sequence_tokens", "sequence_tokens"), ("train.batch_sequences", "batch_sequences")):
        value = answer["work"][attribute]
        if key not in given and getattr(stated, attribute) != value:
            words.append(f"{key}={value}")
    words += strategy_keys(best)
    if path is not None and best.on_nvme:
        words.append(f"strategy.offload.nvme_path={path}")
    return shlex.join([*words, "--ranks", str(best.ranks)])


def recipe_with_adapter(model: str, overrides: list[str]) -> tuple[str, list[str]] | None:
    """Return (the shipped recipe of this model and adapter, the overrides that it does not say itself), if there is one."""
    wanted = dict(o.split("=", 1) for o in overrides if o.startswith("adapter."))
    if "adapter.kind" not in wanted:
        return None
    for name in shipped_recipes():
        recipe = load_recipe(name)
        quantize = wanted.get("adapter.quantize", "none")
        there = recipe.model.path or ""
        same = recipe.adapter.kind == wanted["adapter.kind"] and recipe.adapter.quantize == quantize
        if same and model in (there, HUB.get(there.lower())):
            said = (f"adapter.kind={recipe.adapter.kind}", f"adapter.quantize={recipe.adapter.quantize}")
            return name, [o for o in overrides if o not in said]
    return None


def with_weights(model: str, overrides: list[str]) -> str:
    """Return a model's name; under an adapter, which stands on weights, a preset's by the hub's name that brings them."""
    adapted = any(o.startswith("adapter.kind=") and o != "adapter.kind=none" for o in overrides)
    if not adapted or model not in presets():
        return model
    return hub_name(model) or NO_WEIGHTS


def strategy_keys(strategy: Strategy) -> list[str]:
    """Return the recipe keys that leave the planner nothing to choose: they are read back as the same strategy."""
    keys = [f"strategy={strategy.word}", f"strategy.micro_batch={strategy.micro_batch}"]
    if strategy.recompute == "none":
        keys.append("strategy.recompute=none")
    if strategy.zero == 3 and strategy.engine == "native" and strategy.reduce_gradients == "every_micro_batch":
        keys.append("strategy.reduce_gradients=every_micro_batch")
    return keys
