"""A step in one line for the console: loss, gradient norm, learning rate, speed, share of the limit, memory."""

from __future__ import annotations

from typing import Any

from tercet.units import show_bytes, show_count


def full_speed(plan: dict[str, Any] | None) -> float | None:
    """Return the tokens/s at which the cards' matmuls would run at their data sheet's rate; None where it is unknown.

    The plan holds the share that it expects (MFU) of a speed that it expects.
    """
    mfu, speed = ((plan or {}).get(key) for key in ("mfu", "tokens_per_second"))
    return speed / mfu if mfu and speed else None


def step_line(fields: dict[str, Any], limit: float | None) -> str:
    """Return the figures of a step; what is not known is left out."""
    words = [f"loss {fields['loss']:.4f}"]
    if "grad_norm" in fields:
        words.append(f"norm {fields['grad_norm']:.2f}")
    if "lr" in fields:
        words.append(f"lr {fields['lr']:.2g}")
    if "expert_load" in fields:
        words.append(f"fullest expert {fields['expert_load']:.2f}x")
    speed = fields["tokens_per_second"]
    words.append(f"{show_count(speed)} tokens/s" + (f" ({speed / limit:.0%} of the limit)" if limit else ""))
    if fields.get("memory_bytes"):
        words.append(show_bytes(fields["memory_bytes"]))
    return "  ".join(words)
