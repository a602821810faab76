"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101): two moments per number, and one count of steps per tensor."""

from __future__ import annotations

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim names them, and as checkpoints do
STATE_BYTES = 4 * len(MOMENTS)  # per element, in fp32
COUNT_BYTES = 4  # per tensor that a rank holds any rows of
