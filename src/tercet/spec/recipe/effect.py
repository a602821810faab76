"""Which keys act only beside others. A key that was set and could not act is refused, with what it needs.

A key counts as set when its value is not its default: a resolved recipe says every key. Where the command line takes
away what a key of the file needs (`data.validation=none` over a file with `evaluate_every`), the file's key goes with
it; where both were said in one place, one of them was not meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tercet.errors import InputError
from tercet.spec.model import Model
from tercet.spec.recipe.sections import Recipe


@dataclass(frozen=True)
class Rule:
    """`keys` (dotted; * for any number of a list) act only where `acts`; `needs` says so in words.

    `by`: the keys that decide; none where it is the model that does.
    """

    keys: tuple[str, ...]
    needs: str
    acts: Callable[[Recipe], bool]
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRule:
    """As Rule, for what the described model decides."""

    keys: tuple[str, ...]
    needs: str
    acts: Callable[[Recipe, Model], bool]


def _speed(recipe: Recipe, model: Model) -> float:
    chosen = recipe.train.balance.bias_speed
    return model.balance.bias_speed if chosen == "auto" else chosen


def _has_experts(recipe: Recipe, model: Model) -> bool:
    return (
        model.module == "tercet"
        and not model.frozen
        and any(block.idle_parameters(model.width) for _, block in model.blocks())
    )


RULES = (
    Rule(
        ("model.preset", "model.family"),
        "a model that is not read from model.path",
        lambda r: r.model.path is None,
        ("model.path",),
    ),
    Rule(
        ("model.init",),
        "model.path, which names the weights; without it the start is random",
        lambda r: r.model.path is not None or r.model.init == "random",
        ("model.path", "model.preset", "model"),
    ),
    Rule(
        ("data.train.*.weight",),
        "a second source to be weighed against",
        lambda r: len(r.data.train) > 1,
        ("data.train",),
    ),
    Rule(
        ("data.temperature",),
        "a second source to share the training with",
        lambda r: len(r.data.train) > 1,
        ("data.train",),
    ),
    Rule(
        ("data.stream",),
        "train.steps: how many rows a stream has is not known before its end",
        lambda r: r.train.steps is not None,
    ),
    Rule(
        ("data.validation.*.weight", "data.validation.*.epochs"),
        "training sources: validation reads each row once, whatever its source",
        lambda r: False,
    ),
    Rule(
        ("strategy.offload.nvme_path",),
        "strategy.offload.optimizer=nvme or strategy.offload.weights=nvme",
        lambda r: "nvme" in (r.strategy.offload.optimizer, r.strategy.offload.weights),
        ("strategy.offload.optimizer", "strategy.offload.weights", "strategy"),
    ),
    Rule(
        ("optim.decay_steps",),
        "optim.schedule=wsd",
        lambda r: r.optim.schedule == "wsd",
        ("optim.schedule",),
    ),
    Rule(
        ("optim.min_lr_ratio",),
        "optim.schedule=linear, cosine or wsd",
        lambda r: r.optim.schedule != "constant",
        ("optim.schedule",),
    ),
    Rule(
        ("train.evaluate_every",),
        "data.validation",
        lambda r: r.data.validation is not None,
        ("data.validation",),
    ),
    Rule(
        ("train.sample_every", "train.sample_tokens", "train.sample_temperature"),
        "train.sample_prompts",
        lambda r: bool(r.train.sample_prompts),
        ("train.sample_prompts",),
    ),
    Rule(
        ("train.nonfinite_limit",),
        "train.nonfinite=skip, or train.precision=fp16, whose overflows are skipped",
        lambda r: r.train.nonfinite == "skip" or r.train.precision == "fp16",
        ("train.nonfinite", "train.precision"),
    ),
    Rule(
        ("train.fp16_accumulation",),
        "train.precision=fp16",
        lambda r: r.train.precision == "fp16",
        ("train.precision",),
    ),
    Rule(
        ("train.mtp.weight",),
        "train.mtp.late_after above 0: late_weight counts from the first step",
        lambda r: r.train.mtp.late_after > 0,
        ("train.mtp.late_after",),
    ),
    Rule(
        ("train.mtp.late_weight",),
        "train.mtp.late_after below 1: no step comes after it",
        lambda r: r.train.mtp.late_after < 1,
        ("train.mtp.late_after",),
    ),
)

MODEL_RULES = (
    ModelRule(
        ("train.balance.sequence_loss", "train.balance.batch_loss"),
        "a model with experts that are trained",
        _has_experts,
    ),
    ModelRule(
        ("train.balance.bias_speed",),
        "a model whose experts have a bias (the family deepseek_v3)",
        lambda r, model: any(t.kind == "balance" for t in model.buffers()),
    ),
    ModelRule(
        ("train.balance.bias_until",),
        "a bias that moves (the family deepseek_v3, and train.balance.bias_speed above 0)",
        lambda r, model: _speed(r, model) > 0 and any(t.kind == "balance" for t in model.buffers()),
    ),
    ModelRule(
        ("train.mtp.weight", "train.mtp.late_weight", "train.mtp.late_after"),
        "a model that predicts further tokens (model.mtp_depth above 0)",
        lambda r, model: bool(model.mtp),
    ),
)


def keys_set(node: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted key, the same with * for numbers, value) of every key whose value is not its default."""
    for name, field in type(node).model_fields.items():
        value, key = getattr(node, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from keys_set(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                yield from keys_set(item, f"{key}.{number}.")
        elif value != field.get_default(call_default_factory=True):
            yield key, ".".join("*" if part.isdigit() else part for part in key.split(".")), value


def idle(recipe: Recipe) -> list[tuple[str, Any, Rule]]:
    """Return (key, value, rule) for every key that is set and cannot act, whatever the model."""
    broken = [rule for rule in RULES if not rule.acts(recipe)]
    return [(key, value, rule) for key, plain, value in keys_set(recipe) for rule in broken if plain in rule.keys]


def idle_sentence(key: str, value: Any, needs: str) -> str:
    return f"{key} is {value}, but acts only with {needs}"


def refuse_idle_for(recipe: Recipe, model: Model) -> None:
    """Raise InputError for keys that are set and change nothing in this model."""
    broken = [rule for rule in MODEL_RULES if not rule.acts(recipe, model)]
    sentences = [
        idle_sentence(key, value, rule.needs)
        for key, plain, value in keys_set(recipe)
        for rule in broken
        if plain in rule.keys
    ]
    if sentences:
        raise InputError("\n".join(sentences), HINT)


HINT = "Take the key out, or give what it needs."
