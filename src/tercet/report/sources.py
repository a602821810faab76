"""What each source of a mix lost: means over stretches of a run, from the sums that every step recorded."""

from __future__ import annotations

from typing import Any

from tercet.report.compare import number

STRETCH = 0.1  # of the recorded steps: the first and the last tenth are compared


def losses_of(events: list[dict[str, Any]], source: int) -> list[tuple[float, float]]:
    """Return (step, mean loss of the source) of the steps that trained some of it."""
    found = ((number(e.get("step")), _entry(e, "source_loss", source)) for e in events)
    return sorted((x, y) for x, y in found if x is not None and y is not None)


def mean_loss(events: list[dict[str, Any]], source: int) -> tuple[float | None, float]:
    """Return (mean loss over all that these steps trained of a source, the sum of its weights)."""
    pairs = [(_entry(e, "source_loss", source), _entry(e, "source_weight", source)) for e in events]
    known = [(loss, weight) for loss, weight in pairs if loss is not None and weight is not None]
    total = sum(weight for _, weight in known)
    return (sum(loss * weight for loss, weight in known) / total if total else None), total


def source_rows(sources: list[str], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per source {name, weight, share, first, last}; none for a run of one source.

    `weight` is that of all its trained tokens, their number where each counts once; `first` and `last` are mean losses
    over the first and the last tenth of the steps.
    """
    if len(sources) < 2 or not any("source_loss" in e for e in steps):
        return []
    length = max(1, round(STRETCH * len(steps)))
    rows = []
    for n, name in enumerate(sources):
        first, last = mean_loss(steps[:length], n)[0], mean_loss(steps[-length:], n)[0]
        rows.append({"name": name, "weight": mean_loss(steps, n)[1], "first": first, "last": last})
    total = sum(row["weight"] for row in rows)
    return [{**row, "share": row["weight"] / total if total else 0.0} for row in rows]


def _entry(event: dict[str, Any], key: str, source: int) -> float | None:
    values = event.get(key)
    return number(values[source]) if isinstance(values, list) and source < len(values) else None
