"""The model of a recipe as it is trained: with its adapter, and with what is frozen."""

from __future__ import annotations

from dataclasses import replace

from tercet.errors import InputError, nearest
from tercet.spec.adapter import Adapter, module_of, with_adapter
from tercet.spec.families import describe
from tercet.spec.model import Model
from tercet.spec.patterns import names
from tercet.spec.recipe import AdapterSection, Recipe


def trained_model(recipe: Recipe) -> Model:
    """Return the Model that a recipe trains. Raises InputError for patterns that match nothing."""
    model = describe(recipe.model)
    if recipe.adapter.kind != "none":
        model = with_adapter(model, adapter_of(recipe.adapter))
    return with_frozen(model, tuple(recipe.train.freeze))


def adapter_of(section: AdapterSection) -> Adapter:
    targets = (section.targets,) if isinstance(section.targets, str) else tuple(section.targets)
    return Adapter(
        section.rank,
        section.alpha,
        section.dropout,
        section.rslora,
        targets,
        tuple(section.modules_to_save),
        section.quantize,
    )


def with_frozen(model: Model, patterns: tuple[str, ...]) -> Model:
    """Return the model with every tensor frozen whose name one of the patterns matches.

    A pattern is a module or tensor, or one with *: embed_tokens, lm_head, norm, model.layers.[0-3].*. Raises
    InputError for one that matches nothing, and when nothing would be left to train.
    """
    for pattern in patterns:
        if not any(names(t.name, pattern) for t in model.tensors()):
            ends = sorted({module_of(t).rpartition(".")[2] for t in model.tensors()})
            raise InputError(
                f"train.freeze: {pattern!r} matches no tensor of this model{nearest(pattern, ends)}",
                f"There are: {', '.join(ends)}, each after model.layers.N. and so on; * stands for anything.",
            )
    model = replace(model, freeze=patterns)
    if patterns and not any(model.trains(t) for t in model.tensors()):
        raise InputError(f"train.freeze: {', '.join(patterns)} leaves nothing to train")
    return model
