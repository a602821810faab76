"""A step in one line for the console: loss, gradient norm, learning rate, speed, share of the limit, memory."""

from __future__ import annotations

from typing import Any

from tercet.units import show_bytes, show_count


def full_step_seconds(plan: dict[str, Any] | None) -> float | None:
    """Return the time of a step whose matmuls run at the cards' data sheet's rate; None where it is unknown.

    The plan holds the share of that rate that it expects (MFU), in a step as long as it expects.
    """
    mfu, seconds = ((plan or {}).get(key) for key in ("mfu", "step_seconds"))
    return seconds * mfu if mfu and seconds else None


def step_line(fields: dict[str, Any], least_seconds: float | None) -> str:
    """Return the figures of a step; what is not known is left out. `least_seconds`: a step's at the cards' limit."""
    words = [f"loss {fields['loss']:.4f}"]
    if "grad_norm" in fields:
        words.append(f"norm {fields['grad_norm']:.2f}")
    if "lr" in fields:
        words.append(f"lr {fields['lr']:.2g}")
    if "expert_load" in fields:
        words.append(f"fullest expert {fields['expert_load']:.2f}x")
    share = f" ({least_seconds / fields['seconds']:.0%} of the limit)" if least_seconds else ""
    words.append(f"{show_count(fields['tokens_per_second'])} tokens/s{share}")
    if fields.get("memory_bytes"):
        words.append(show_bytes(fields["memory_bytes"]))
    return "  ".join(words)
