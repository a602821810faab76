"""Pipeline parallel, described: consecutive layers per stage, numbers of layers differing by at most one."""

from __future__ import annotations

from tercet.spec.axes.split import balanced
from tercet.spec.model import Model


def legal(model: Model, size: int) -> list[str]:
    layers = len(model.layers)
    if size <= layers:
        return []
    return [f"strategy.pipeline: {size} stages exceed the model's {layers} layers; at most {layers}"]


def split(model: Model, size: int) -> tuple[int, ...]:
    """Return the layers of each stage: 64 over 3 is 22, 21, 21."""
    return balanced(len(model.layers), size)
