"""Predicted beside measured, row by row: plan.json against summary.json.

Bytes are those of the fullest rank: a plan is made for it, and a measurement is the largest over the ranks.
A figure that one side does not have is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

MEMORY_ROWS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
# Offloaded state and its buffers: host memory, which is the rank's own where there is no card.
HOST_ROWS = ("states", "pinned")
MOMENTS = {"between_steps": "between steps", "peak": "at the peak"}
# What a process holds at most is read where it lives: a card's allocator knows its tensors, not the context
# and the gaps that `reserve` stands for; resident host memory is everything.
PEAKS = {"cuda": ("allocated at the peak", False), "cpu": ("resident at the peak", True)}

ComparedRow = dict[str, Any]


def compare(
    plan: dict[str, Any], summary: dict[str, Any], rehearsal: dict[str, Any] | None = None
) -> list[ComparedRow]:
    """Return rows {what, group, unit, predicted, measured, error}; error: predicted / measured - 1, or None.

    Time and speed have the plan's `range` beside them, [low, high] that holds four of five measurements, where it has one.

    With a rehearsal (rehearsal.json) each row has `rehearsed` too: what it found on a simulated card, or None.

    `group` is "between steps", "at the peak" or "time"; `unit` bytes, s or tokens/s. Any key may be missing
    on either side: its figure is None then. The ledger's rows are always there, others when a side has them.
    """
    rows = [*_memory(plan, summary), *_time(plan, summary)]
    if rehearsal:
        at_peak = {"allocated at the peak": rehearsal.get("peak_bytes"), **_numbers(_get(rehearsal, "peak", "rows"))}
        times = {
            "step": _get(rehearsal, "step", "seconds"),
            "tokens per second": _get(rehearsal, "step", "tokens_per_second"),
        }
        figures = {"at the peak": at_peak, "time": times}
        rows = [{**row, "rehearsed": number(figures.get(row["group"], {}).get(row["what"]))} for row in rows]
    return rows


def _row(group: str, what: str, unit: str, predicted: float | None, measured: float | None) -> ComparedRow:
    return {
        "what": what,
        "group": group,
        "unit": unit,
        "predicted": predicted,
        "measured": measured,
        "error": error_of(predicted, measured),
    }


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1; 0 when both are 0; None when a side is missing or 0 was measured."""
    if predicted is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return predicted / measured - 1


def _memory(plan: dict[str, Any], summary: dict[str, Any]) -> list[ComparedRow]:
    rows = []
    for moment, name in MOMENTS.items():
        predicted, measured = predicted_rows(plan, moment), _largest(_get(summary, "memory", moment))
        # Rows of an engine's own; one that holds nothing and was not planned says nothing.
        held = {row for row, bytes_held in measured.items() if bytes_held}
        extra = sorted((predicted.keys() | held) - set(MEMORY_ROWS))
        rows += [_row(name, what, "bytes", predicted.get(what), measured.get(what)) for what in (*MEMORY_ROWS, *extra)]
    peaks = summary.get("peak_bytes_per_rank")
    peak = max((p for p in map(number, peaks) if p is not None), default=None) if isinstance(peaks, list) else None
    if peak is not None:
        rows.append(_peak(predicted_rows(plan, "peak"), peak, device_of(plan, summary)))
    return rows


def _peak(predicted: dict[str, float], peak: float, device: str) -> ComparedRow:
    """The whole of a rank. Without a known device nobody can say what was measured: no prediction then."""
    what, with_reserve = PEAKS.get(device, ("largest at the peak", None))
    whole = None
    if with_reserve is not None and all(row in predicted for row in MEMORY_ROWS):
        elsewhere = () if with_reserve else ("reserve", *HOST_ROWS)
        whole = sum(v for row, v in predicted.items() if row not in elsewhere)
    return _row("at the peak", what, "bytes", whole, peak)


def device_of(plan: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return where the ranks' tensors lay: cpu or cuda; "" when neither summary nor plan says."""
    if isinstance(summary.get("device"), str):
        return summary["device"].partition(":")[0]
    return {"cpu": "cpu", "gpu": "cuda"}.get(_get(plan, "machine", "kind"), "")


def predicted_rows(plan: dict[str, Any], moment: str) -> dict[str, float]:
    """Return the plan's {ledger row: bytes} of the fullest rank at a moment; empty when it has none.

    The plan's host rows are the whole machine's: a rank's share of what is offloaded stands beside its own rows.
    """
    rows = _largest(_get(plan, "moments", moment))
    if not rows and moment == "peak":  # `ledger` alone is what must fit, which is the peak
        rows = _largest(plan.get("ledger"))
    host, ranks = _numbers(plan.get("host")), number(_get(plan, "strategy", "ranks"))
    if rows and ranks and plan.get("offload"):
        rows |= {row: host[row] / ranks for row in HOST_ROWS if row in host}
    return rows


def _time(plan: dict[str, Any], summary: dict[str, Any]) -> list[ComparedRow]:
    rows = []
    for key, what, unit in (
        ("tokens_per_second", "tokens per second", "tokens/s"),
        ("step_seconds", "step", "s"),
    ):
        predicted, measured = number(plan.get(key)), number(summary.get(key))
        if key == "tokens_per_second" and measured is not None:
            measured = _positions_per_second(plan, summary) or measured
        if predicted is not None or measured is not None:
            row = _row("time", what, unit, predicted, measured)
            span = _get(plan, "ranges", key)
            known = isinstance(span, list) and len(span) == 2 and all(number(v) is not None for v in span)
            rows.append({**row, "range": span} if known else row)
    predicted, measured = _numbers(plan.get("clock")), _numbers(summary.get("clock"))
    rows += [_row("time", part, "s", predicted[part], measured[part]) for part in predicted if part in measured]
    return rows


def _positions_per_second(plan: dict[str, Any], summary: dict[str, Any]) -> float | None:
    """Return the measured speed as the plan counts it: every position of a step's sequences, while a run counts its
    trained tokens, which in chats are few."""
    speed, step, measured = (
        number(tree.get(key))
        for tree, key in ((plan, "tokens_per_second"), (plan, "step_seconds"), (summary, "step_seconds"))
    )
    return speed * step / measured if speed and step and measured else None


def number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None (a flag is no number)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _get(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _numbers(rows: Any) -> dict[str, float]:
    if not isinstance(rows, dict):
        return {}
    return {str(k): n for k, v in rows.items() if (n := number(v)) is not None}


def _largest(ranks: Any) -> dict[str, float]:
    """Return the largest figure of each row over the ranks; `ranks` is one rank's rows or a list of them."""
    every: Iterable[Any] = ranks if isinstance(ranks, list) else [ranks]
    found: dict[str, float] = {}
    for rows in map(_numbers, every):
        for row, value in rows.items():
            found[row] = max(value, found.get(row, value))
    return found
