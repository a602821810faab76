"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv 1710.03740).

fp16 ends at 65504 and loses what is below 6e-8, so the loss is multiplied before backward and the fp32 gradients are
divided by the same number before the update. A power of two changes no bit of what stays in range. A step whose
gradients overflow is skipped and halves the scale; after enough good ones in a row it doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GOOD_STEPS = 1000  # in a row, before the scale doubles


@dataclass
class LossScale:
    """`scale` is that of the next step, `good` the steps since it last changed: both are saved."""

    scale: float = FIRST
    good: int = 0

    def after(self, overflowed: bool) -> float:
        """Take a step's outcome; return the scale from here on."""
        if overflowed:
            self.scale, self.good = max(self.scale / 2, SMALLEST), 0
        elif self.good + 1 == GOOD_STEPS:
            self.scale, self.good = min(self.scale * 2, LARGEST), 0
        else:
            self.good += 1
        return self.scale

    def state(self) -> dict[str, Any]:
        return {"loss_scale": self.scale, "good_steps": self.good}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a save's scale; a run saved in another precision has none and starts with the first."""
        self.scale, self.good = saved.get("loss_scale", FIRST), saved.get("good_steps", 0)
