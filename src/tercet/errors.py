"""The one root of every error that reaches a user: what is wrong, the value seen, what to do.

Exit codes (the same for every command): 0 done; 1 failed; 2 wrong use or bad input;
3 will not fit or is not legal; 130 interrupted after saving.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TercetError(Exception):
    """Something failed while running. `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class InputError(TercetError):
    """Wrong use or bad input: names the file and line, or the key, and the value seen."""

    exit_code = 2


class NotLegalError(TercetError):
    """The run will not fit or the strategy is not legal; `why` holds one sentence per reason."""

    exit_code = 3

    def __init__(self, why: Iterable[str], hint: str | None = None):
        self.why = list(why)
        super().__init__("\n".join(self.why), hint)


class InterruptedRun(TercetError):
    """A signal ended the run after it had saved."""

    exit_code = 130


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ": did you mean a, b?" for the closest known names, or "" when none is close."""
    # Hyphens and capitals are the usual slips and should not hide an otherwise exact match.
    folded = {k.replace("-", "_").lower(): k for k in known}
    matches = get_close_matches(name.replace("-", "_").lower(), list(folded), n=limit, cutoff=0.6)
    return f"; did you mean {', '.join(folded[m] for m in matches)}?" if matches else ""


def listed(names: set[str]) -> str:
    """Return "3 (a, b, c)", cut after eight names."""
    if not names:
        return "none"
    shown = ", ".join(sorted(names)[:8])
    return f"{len(names)} ({shown}{', …' if len(names) > 8 else ''})"
