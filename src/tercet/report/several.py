"""Several runs beside one another: their figures, and the recipe keys in which they differ."""

from __future__ import annotations

from typing import Any

from tercet.report.show import MISSING, ranks_of, show_loss, strategy_of
from tercet.report.story import Story
from tercet.units import show_bytes, show_count, show_seconds

FIGURES = (
    "steps",
    "tokens",
    "train_loss",
    "validation_loss",
    "best_validation_loss",
    "tokens_per_second",
    "seconds",
    "peak_bytes",
)
NEVER = {"name", "output.folder"}  # differ between any two runs and say nothing


def beside(stories: list[Story]) -> dict[str, Any]:
    """Return {"runs": figures of each, "differences": recipe key -> value in each run}."""
    flat = [_flat(story.recipe) for story in stories]
    keys = sorted({key for recipe in flat for key in recipe} - NEVER)
    differing = {key: [recipe.get(key) for recipe in flat] for key in keys}
    runs = []
    for story in stories:
        row = {"run": str(story.run.path), "state": story.state, "strategy": strategy_of(story)}
        runs.append({**row, "ranks": ranks_of(story), **{key: story.headline.get(key) for key in FIGURES}})
    return {
        "runs": runs,
        "differences": {k: v for k, v in differing.items() if any(value != v[0] for value in v[1:])},
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def show(found: dict[str, Any], width: int) -> str:
    """Return a block per run where a table would be too wide: figures first, then what differs."""
    runs = found["runs"]
    lines = [f"({n}) {run['run']}: {run['state']}" for n, run in enumerate(runs, 1)]
    table = [["", *(f"({n})" for n in range(1, len(runs) + 1))]]
    words = {"strategy": str, "ranks": str, "steps": str, "tokens": show_count, "tokens_per_second": show_count}
    words |= {"train_loss": show_loss, "validation_loss": show_loss, "best_validation_loss": show_loss}
    words |= {"seconds": show_seconds, "peak_bytes": show_bytes}
    for key, word in words.items():
        cells = [MISSING if run[key] is None else word(run[key]) for run in runs]
        table.append([key.replace("_", " ").removesuffix(" bytes").replace("seconds", "time"), *cells])
    for key, values in found["differences"].items():
        table.append([key, *(_short(value, max(12, width // (len(runs) + 1))) for value in values)])
    return "\n".join([*lines, "", *_columns(table)])


def _short(value: Any, room: int) -> str:
    text = str(value)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
