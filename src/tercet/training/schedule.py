"""What changes over a run as a pure function of the optimizer step: no state, so nothing to resume and nothing to step."""

from __future__ import annotations

import math
from dataclasses import replace

from tercet.engine import Terms
from tercet.spec.model import Balance, Model
from tercet.spec.recipe import OptimSection, TrainSection


def learning_rate(optim: OptimSection, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (0-based) of `total_steps`.

    Warm-up: lr * (step + 1) / warmup_steps. Then, with t from 0 towards 1 over the steps that are left and
    m = min_lr_ratio: constant 1; linear 1 - (1 - m) t; cosine m + (1 - m) (1 + cos(pi t)) / 2; wsd
    (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395) 1 until the last decay_steps, then linear to m.
    """
    warmup = optim.warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    left = max(1, total_steps - warmup)
    t, low = min(1.0, (step - warmup) / left), optim.min_lr_ratio
    if optim.schedule == "constant":
        factor = 1.0
    elif optim.schedule == "linear":
        factor = 1.0 - (1.0 - low) * t
    elif optim.schedule == "cosine":
        factor = low + (1.0 - low) * (1.0 + math.cos(math.pi * t)) / 2
    else:
        decay = total_steps // 5 if optim.decay_steps == "auto" else min(optim.decay_steps, left)
        into = step - (total_steps - decay)
        factor = 1.0 if into < 0 or decay == 0 else 1.0 - (1.0 - low) * (into + 1) / decay
    return optim.lr * factor


def further_terms(train: TrainSection, model: Model, step: int, total_steps: int) -> Terms:
    """Return what optimizer step `step` (0-based) learns besides the main loss; auto is what the family used."""
    done, chosen, own = step / max(1, total_steps), train.balance, model.balance
    balance = Balance(
        bias_speed=own.bias_speed if chosen.bias_speed == "auto" else chosen.bias_speed,
        sequence_loss=own.sequence_loss if chosen.sequence_loss == "auto" else chosen.sequence_loss,
        batch_loss=own.batch_loss if chosen.batch_loss == "auto" else chosen.batch_loss,
    )
    if done >= chosen.bias_until:
        balance = replace(balance, bias_speed=0.0)
    return Terms(balance, train.mtp.weight if done < train.mtp.late_after else train.mtp.late_weight)
