"""The number formats that an engine holds, against those that the recipe means: asked once, when it is built.

What a library makes of a format may hang on the machine (whether its processor has fp16, say), and a run in another
format than the one written into its recipe trains, only worse. So every engine answers here before its first step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tercet.errors import NotLegalError

Held = tuple[str, torch.dtype, torch.dtype]  # what (weight NAME), the format it has, the format it must have


def held(what: str, tensors: Iterable[tuple[str, torch.dtype]], wanted: torch.dtype) -> list[Held]:
    return [(f"{what} {name}", found, wanted) for name, found in tensors]


def check_formats(precision: str, engine: str, everything: Iterable[Held]) -> None:
    """Raise NotLegalError that names what is held in another format than `precision` means."""
    wrong = [(what, found, wanted) for what, found, wanted in everything if found != wanted]
    if not wrong:
        return
    what, found, wanted = wrong[0]
    more = f", and {len(wrong) - 1} more like it" if wrong[1:] else ""
    raise NotLegalError(
        [
            f"train.precision is {precision}, but the engine {engine} has built the {what} in {_word(found)} where "
            f"{_word(wanted)} is meant{more}; training would go on in the wrong format"
        ],
        "This machine and the installed version do not go together; another strategy.engine or train.precision may.",
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
