"""How far a prediction may be off, and how likely a run is to run out of memory: from the errors of held-out rows.

Half-widths are logarithms: four of five measured figures lie within a factor e**half of the prediction. They are those
of rows that a fit had not seen anything of (the whole source left out), so they hold for a program nobody has
measured, which our own engine on cards still is. A card without a measured row is wider by what leaving a card out
costs. bench/plan_truth.py --fit writes them, and says how many truths lie within.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, exp, log, sqrt

from tercet.planner.constants import COLLECTIVE_BYTES, CONTEXT_BYTES, Constants, ranges
from tercet.planner.job import Job
from tercet.spec.machine import Machine

LIKELY = 0.5  # a run that is more likely than not to run out of memory does not fit
NORMAL_80 = 1.2816  # half of the range that holds 80 %, in standard deviations


@dataclass(frozen=True)
class Spread:
    """Half-widths in logarithms of the range that holds 80 %."""

    speed: float
    memory: float


def spread(job: Job, machine: Machine) -> Spread | None:
    """Return how far off predictions of such a job are; None on a CPU, of which no published run tells."""
    known = ranges()
    if machine.card is None or not known:
        return None
    unseen = known["unseen_card"] if machine.card.name not in known["cards"] else 1.0
    return Spread(known["speed_one" if job.ranks == 1 else "speed_several"] * unseen, known["memory"])


def within(value: float, half: float) -> list[float]:
    return [value * exp(-half), value * exp(half)]


def out_of_memory_chance(need: float, job: Job, machine: Machine, constants: Constants) -> float | None:
    """Return how likely the tensors outgrow the card, whose allocator may give back all that it keeps in reserve."""
    if (found := spread(job, machine)) is None or machine.card is None:
        return None
    fixed = CONTEXT_BYTES + (COLLECTIVE_BYTES if job.ranks > 1 else 0)
    tensors, room = (need - fixed) / (1 + constants.reserve_share), machine.card.usable_bytes - fixed
    if tensors <= 0 or room <= 0:
        return 0.0 if room > 0 else 1.0
    return 0.5 * (1 - erf(log(room / tensors) / (found.memory / NORMAL_80) / sqrt(2)))
