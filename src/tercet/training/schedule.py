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


def schedule_remarks(optim: OptimSection, total_steps: int) -> list[str]:
    """Return what in a schedule is probably not what was meant, and what was."""
    remarks, warmup = [], optim.warmup_steps
    last = learning_rate(optim, total_steps - 1, total_steps)
    if warmup >= total_steps > 1:
        remarks.append(
            f"optim.warmup_steps is {warmup} and the run has {total_steps} steps: all of it is warm-up, the rate ends at "
            f"{last / optim.lr:.0%} of optim.lr and the {optim.schedule} schedule never begins; probably meant: "
            f"optim.warmup_steps={total_steps // 10}"
        )
    decay = optim.decay_steps
    if optim.schedule == "wsd" and decay != "auto" and decay > max(0, total_steps - warmup):
        remarks.append(
            f"optim.decay_steps is {decay}, but only {max(0, total_steps - warmup)} of {total_steps} steps come after the "
            f"warm-up: the decay is as long as those; probably meant: optim.decay_steps={total_steps // 5}"
        )
    if last == 0:
        remarks.append(
            f"the last step's learning rate is 0 (optim.schedule {optim.schedule}, optim.min_lr_ratio "
            f"{optim.min_lr_ratio:g}): that step changes nothing; probably meant: optim.min_lr_ratio=0.1"
        )
    return remarks


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
