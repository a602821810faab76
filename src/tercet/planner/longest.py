"""The longest sequence that fits: what a user with long texts asks before anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tercet.planner.search import Candidate, Search

STEP = 256  # tokens; lengths are looked for in steps of so many


def longest_sequence(search: Search, fits: list[Candidate]) -> dict[str, Any] | None:
    """Return {"tokens", "strategy"}: the longest rows that any of these strategies holds at micro-batch 1.

    None where nothing fits. Never beyond the model's context.
    """
    rich = [c for c in fits if c.strategy.recompute == "full"] or fits
    found = [(_longest(search, c), c.strategy) for c in rich]
    if not found:
        return None
    tokens, strategy = max(found, key=lambda pair: pair[0])
    return {"tokens": tokens, "strategy": strategy.word}


def _longest(search: Search, candidate: Candidate) -> int:
    """Return the longest length by bisection: memory grows with it."""
    strategy = replace(candidate.strategy, micro_batch=1)
    here, context = search.work.sequence_tokens, search.counts.model.context_tokens

    def holds(tokens: int) -> bool:
        return search.fits(search.candidate(strategy, replace(search.work, sequence_tokens=tokens)))

    if here >= context or holds(context):
        return max(here, context)
    low, high = here, context  # one that fits, one that does not
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if middle in (low, high):
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
