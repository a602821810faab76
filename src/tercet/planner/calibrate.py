"""Fit the constants to measured runs, published ones or this machine's own, and say how far a fit can be trusted.

The fit is a maximum a posteriori estimate in logarithms: errors are log(predicted / measured), constants are drawn
to their priors, and large errors count linearly (Huber), so that one odd row does not bend the rest. Memory and
time constants touch different figures and are fitted together. numpy only; nothing here runs inside `plan`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tercet.errors import InputError
from tercet.planner.clock import clock, step_seconds
from tercet.planner.constants import NAMES, Constants
from tercet.planner.job import Job, of_strategy
from tercet.planner.ledger import moments, reserve, tensors_at_peak
from tercet.spec.counts import Counts
from tercet.spec.machine import Machine
from tercet.spec.model import Model
from tercet.spec.recipe import load_run_recipe
from tercet.spec.run_folder import open_run
from tercet.spec.strategy import Strategy, Work
from tercet.spec.trained import trained_model

FOLDS = 10
FEWEST_STEPS = 5  # of a run that is to be timed
PRIOR_SIGMA = 0.35  # a constant may well be a third off its prior
ROW_SIGMA = 0.12  # what is left of a good row
HUBER = 1.5  # in row sigmas
HIGHEST = {
    "matmul_share": 1.05,
    "matmul_share_geforce": 1.3,
    "int8_share": 1.0,
    "attention_share": 1.0,
    "attention_share_hopper": 1.0,
    "fast_share": 1.0,
    "fp8_share": 1.1,
    "expert_share": 1.0,
    "bandwidth_share": 1.0,
    "overlap": 0.95,
    "pipeline_share": 1.0,
    "host_share": 1.0,
    "peer_share": 1.0,
    "copies_share": 1.0,
}


@dataclass(frozen=True)
class PublishedRun:
    """A measurement, read. `why` says why it cannot be predicted; `assumed` what the row leaves open."""

    id: str
    source: str
    model: Model | None
    job: Job | None
    machine: Machine | None
    tokens_per_s: float | None
    memory_bytes: float | None
    memory_kind: str  # allocated, active, reserved, total
    foreign: bool
    assumed: tuple[str, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a row; None where the row has none to compare with or cannot be predicted."""

    tokens_per_s: float | None
    memory_bytes: float | None


def predicted_memory(counts: Counts, job: Job, constants: Any, kind: str) -> float:
    """Return the memory of a kind: allocated and active: tensors; reserved: PyTorch's; total: the card's; resident:
    a CPU process's.
    """
    tensors = tensors_at_peak(counts, job, constants)
    if kind == "resident":
        return sum(moments(counts, job, constants, on_gpu=False)["peak"].values())
    if kind in ("allocated", "active"):
        return tensors
    if kind == "reserved":
        return tensors * (1 + constants.reserve_share)
    return reserve({"all": tensors}, job, constants, on_gpu=True) + tensors


class Prepared:
    """A row with its model summed, so that a fit walks the model once."""

    def __init__(self, row: PublishedRun):
        assert row.model is not None and row.job is not None and row.machine is not None
        self.row = row
        self.counts = Counts(row.model)

    def predict(self, constants: Constants) -> Prediction:
        row = self.row
        rows = clock(self.counts, row.job, row.machine, constants)  # type: ignore[arg-type]
        speed = row.job.step_tokens / step_seconds(rows) if rows else None  # type: ignore[union-attr]
        memory = predicted_memory(self.counts, row.job, constants, row.memory_kind)  # type: ignore[arg-type]
        return Prediction(speed, memory)

    def errors(self, constants: Constants) -> list[float]:
        """Return log(predicted / measured) of what was measured."""
        predicted, found = self.predict(constants), []
        if self.row.tokens_per_s and predicted.tokens_per_s:
            found.append(math.log(predicted.tokens_per_s / self.row.tokens_per_s))
        if self.row.memory_bytes and predicted.memory_bytes:
            found.append(math.log(predicted.memory_bytes / self.row.memory_bytes))
        return found


def fit(
    rows: Sequence[Prepared], start: Constants | None = None, prior: Constants | None = None, rounds: int = 8
) -> Constants:
    """Return the constants that fit the rows best, drawn to `prior`; begins at `start`."""
    prior = prior or Constants()
    centre = np.log([getattr(prior, n) for n in NAMES])
    point = np.log([getattr(start or prior, n) for n in NAMES])
    top = np.log([HIGHEST.get(n, math.inf) for n in NAMES])
    loss = _loss(_errors(rows, point), point - centre)
    for _ in range(rounds):
        step = _step(rows, point, centre, top)
        # The slopes hold nearby only: a step that makes the fit worse is halved.
        for share in (1.0, 0.5, 0.25, 0.125, 0.0625):
            moved = np.minimum(point + share * step, top)
            found = _loss(_errors(rows, moved), moved - centre)
            if found < loss:
                break
        else:
            break
        size = np.abs(moved - point).max()
        point, loss = moved, found
        if size < 1e-3:
            break
    return replace(prior, **{n: float(v) for n, v in zip(NAMES, np.exp(point), strict=True)})


def _loss(errors: np.ndarray, from_prior: np.ndarray) -> float:
    size = np.abs(errors) / ROW_SIGMA
    of_rows = np.where(size > HUBER, HUBER * (size - HUBER / 2), size**2 / 2).sum()
    return float(of_rows + ((from_prior / PRIOR_SIGMA) ** 2).sum() / 2)


def _step(rows: Sequence[Prepared], point: np.ndarray, centre: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return the Gauss-Newton step of the reweighted errors; a constant at its limit stays if it would pass it."""
    base = _errors(rows, point)
    slopes = np.empty((len(base), len(NAMES)))
    for k in range(len(NAMES)):
        moved = point.copy()
        moved[k] -= 0.02
        slopes[:, k] = (base - _errors(rows, moved)) / 0.02
    scaled = np.abs(base) / ROW_SIGMA
    weight = np.where(scaled > HUBER, HUBER / np.maximum(scaled, 1e-9), 1.0) / ROW_SIGMA**2
    left = slopes.T @ (slopes * weight[:, None]) + np.eye(len(NAMES)) / PRIOR_SIGMA**2
    right = -slopes.T @ (weight * base) - (point - centre) / PRIOR_SIGMA**2
    free = np.ones(len(NAMES), dtype=bool)
    while True:
        step = np.zeros(len(NAMES))
        step[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        beyond = free & (point >= top - 1e-9) & (step > 0)
        if not beyond.any():
            return np.clip(step, -0.3, 0.3)
        free &= ~beyond


def _errors(rows: Sequence[Prepared], point: np.ndarray) -> np.ndarray:
    constants = Constants(**dict(zip(NAMES, np.exp(point).tolist(), strict=True)))
    return np.array([e for r in rows for e in r.errors(constants)])


def leave_one_out(rows: Sequence[Prepared], whole: Constants, prior: Constants | None = None) -> dict[str, Prediction]:
    """Predict each row with constants fitted without it (in-domain figure): a tenth of the rows is left out at a time."""
    found = {}
    for fold in range(min(FOLDS, len(rows))):
        left_out = rows[fold::FOLDS]
        others = [p for n, p in enumerate(rows) if n % FOLDS != fold]
        constants = fit(others, start=whole, prior=prior, rounds=3)
        found |= {p.row.id: p.predict(constants) for p in left_out}
    return found


def publisher(source: str) -> str:
    """Return who measured: the repository, whichever of its pages a row stands on."""
    words = source.replace("https://", "").split()[0].split("/")
    return "/".join(words[:3]) if words[0] == "github.com" else words[0]


def prepare(rows: Iterable[PublishedRun]) -> list[Prepared]:
    """Return the rows that can be predicted."""
    return [Prepared(r) for r in rows if r.why is None]


def of_run(folder: str | Path, here: Machine) -> Prepared:
    """Return a finished run of this machine as a row: its recipe, the strategy it ran, what it measured.

    Raises InputError when it has not finished, is too short to be timed, or ran on something else than `here`.
    """
    run = open_run(folder)
    summary, plan = run.read_summary(), run.read_plan() or {}
    if not summary or not summary.get("finished"):
        raise InputError(f"{run.path} has not finished: there is no summary to learn from", "tercet train --resume RUN")
    if "strategy" not in plan:
        raise InputError(f"{run.plan} names no strategy", "The run was made by an older Tercet; run it again.")
    steps = summary.get("steps") or 0
    if steps < FEWEST_STEPS:
        raise InputError(f"{run.path} has {steps} steps; {FEWEST_STEPS} are the fewest that can be timed")
    ran, machine = plan.get("machine", {}), here.with_ranks(plan["ranks"])
    if (ran.get("kind"), ran.get("card")) != (machine.kind, machine.card.name if machine.card else None):
        raise InputError(
            f"{run.path} ran on {ran.get('card') or ran.get('kind') or 'an unknown machine'}, this is {machine.describe()}",
            "Calibrate on the machine that the runs are from.",
        )
    recipe = load_run_recipe(run.recipe)
    model = trained_model(recipe)
    job = of_strategy(Strategy(**plan["strategy"]), Work.of(recipe), model.module)
    return Prepared(
        PublishedRun(
            id=run.path.name,
            source="this machine",
            model=model,
            job=job,
            machine=machine,
            # Every position of a step, as the clock counts; the run's own figure counts trained tokens.
            tokens_per_s=job.step_tokens / seconds if (seconds := summary.get("step_seconds")) else None,
            memory_bytes=max(summary["peak_bytes_per_rank"]),
            memory_kind="resident" if machine.card is None else "allocated",
            foreign=False,
        )
    )


def corrections(runs: Sequence[Prepared], prior: Constants) -> dict[str, float]:
    """Return the constants that the runs move by more than a thousandth of their prior."""
    fitted = fit(runs, prior=prior)
    return {n: v for n in NAMES if abs((v := getattr(fitted, n)) / getattr(prior, n) - 1) > 1e-3}


def leave_out(rows: Sequence[Prepared], whole: Constants, kind: Callable[[PublishedRun], str]) -> dict[str, Prediction]:
    """Predict the rows of each kind (source, card) with constants fitted on the rows of all others."""
    found = {}
    for name in sorted({kind(p.row) for p in rows}):
        constants = fit([p for p in rows if kind(p.row) != name], start=whole, rounds=5)
        found |= {p.row.id: p.predict(constants) for p in rows if kind(p.row) == name}
    return found


def write(path: Path, values: Constants, foreign: Constants, about: dict[str, Any], ranges: dict[str, Any]) -> None:
    """Write constants.toml: what `plan` reads (`values`), what hand-written systems reach, and what both stand on."""
    lines = ["# Written by `python bench/plan_truth.py --fit`. Meanings: tercet/planner/constants.py.", ""]
    for title, constants in (("values", values), ("foreign", foreign)):
        lines.append(f"[{title}]")
        lines += [f"{n} = {getattr(constants, n):.4g}" for n in NAMES]
        lines.append("")
    for title, figures in (("ranges", ranges), ("about", about)):
        lines += [f"[{title}]", *(f"{k} = {json.dumps(v)}" for k, v in figures.items()), ""]
    path.write_text("\n".join(lines), encoding="utf-8")
