"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101): two moments per number, and one count of steps per tensor."""

from __future__ import annotations

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim names them, and as checkpoints do
COUNT_BYTES = 4  # per tensor that a rank holds any rows of


def scale_of(moment: str) -> str:
    """Return the name of a moment's scales, where it is held in eight bits (blocks.py)."""
    return f"{moment}_scale"
