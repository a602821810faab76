"""Whether DeepSpeed is installed: asked before the ranks start, so without torch."""

from __future__ import annotations

import importlib.util

from tercet.errors import InputError


def require_deepspeed() -> None:
    """Raise InputError, with the way to install it, when DeepSpeed is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "strategy.engine is deepspeed, but DeepSpeed is not installed",
            'Install it with: pip install "tercet[deepspeed]"; or set strategy.engine=native.',
        )
