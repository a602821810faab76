"""What this version runs of the values that a recipe knows: the planner and the trainer refuse the others by this
table, and the JSON schema offers only these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tercet.spec.recipe.sections import Recipe

BUILT: dict[str, tuple[Any, ...]] = {
    "strategy.engine": ("native", "deepspeed", "host"),
    "strategy.tensor": (1,),
    "strategy.pipeline": (1,),
    "strategy.expert": (1,),
    "strategy.context": (1,),
    "train.precision": ("bf16", "fp32", "fp16", "bf16-pure"),
}


def unbuilt(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every value that is accepted by a key but not built."""
    for key, built in BUILT.items():
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        if value not in built:
            yield f"{key} is {value}, which is not built yet; {_listed(built)}"


def _listed(built: tuple[Any, ...]) -> str:
    words = ["leaving it out" if value is None else str(value) for value in built]
    return f"{' and '.join(words)} {'is' if len(words) == 1 else 'are'}"


def runs(word: dict[str, Any]) -> bool:
    """Whether a strategy's word means only what is built."""
    return all(str(value) in map(str, BUILT.get(f"strategy.{key}", (value,))) for key, value in word.items())
