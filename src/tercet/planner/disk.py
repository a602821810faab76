"""Whether a strategy's checkpoints, model and files fit the disk that a user names, and what would make them fit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tercet.planner.ledger import Rows, disk_rows
from tercet.planner.search import Candidate, Search
from tercet.spec.recipe import Recipe
from tercet.units import show_bytes

GIB = 2**30


def disk_of(search: Search, candidate: Candidate, recipe: Recipe, keep: int | None = None) -> Rows:
    """Return bytes of disk by row; `keep`: checkpoints, instead of the recipe's."""
    keep = recipe.output.keep if keep is None else keep
    return disk_rows(search.counts, candidate.job, keep, model_bytes(recipe))


def model_bytes(recipe: Recipe) -> float:
    """Return bytes per parameter of the exported model: what output.model_dtype says, else the precision's own."""
    dtype = recipe.output.model_dtype or ("fp32" if recipe.train.precision == "fp32" else "bf16")
    return 4 if dtype == "fp32" else 2


def short_of_disk(search: Search, candidate: Candidate, recipe: Recipe) -> int:
    """Return the bytes that are missing; 0 where the disk is not known."""
    there = search.machine.disk_bytes
    return 0 if there is None else max(0, sum(disk_of(search, candidate, recipe).values()) - there)


def disk_refusal(search: Search, candidate: Candidate, recipe: Recipe) -> dict[str, Any]:
    """Return the refusal of a strategy that fits cards and host but not the disk."""
    rows = disk_of(search, candidate, recipe)
    need, short = sum(rows.values()), short_of_disk(search, candidate, recipe)
    each = ", ".join(f"{name} {show_bytes(size)}" for name, size in rows.items())
    keep = fewer_checkpoints(search, candidate, recipe)
    way = f"output.keep={keep}" if keep is not None else f"--disk {-(-need // GIB)}GiB"
    return {
        "name": candidate.strategy.word,
        "strategy": asdict(candidate.strategy),
        "why": [
            f"needs {show_bytes(need)} of disk ({each}), {show_bytes(search.machine.disk_bytes or 0)} are free: "
            f"{show_bytes(short)} short; fits with {way}"
        ],
        "short": {"card_bytes": 0, "host_bytes": 0, "disk_bytes": short},
        "way_out": {
            "keys": [way] if keep is not None else [],
            "options": {} if keep is not None else {"disk": f"{-(-need // GIB)}GiB"},
            "says": way,
        },
    }


def fewer_checkpoints(search: Search, candidate: Candidate, recipe: Recipe) -> int | None:
    """Return the largest number of checkpoints below the recipe's that fits; None: not even one does."""
    there = search.machine.disk_bytes or 0
    kept = range(recipe.output.keep - 1, 0, -1)
    return next((n for n in kept if sum(disk_of(search, candidate, recipe, n).values()) <= there), None)
