"""Host memory that saving takes where state lies on cards: the planner's and the engines' one rule.

What is written behind the next steps is copied to the host first, all at once. Where the host has no room for that,
training waits and the state goes to the disk piece by piece.
"""

from __future__ import annotations

PIECE_BYTES = 2**30  # of one rank; a larger tensor is a piece of its own
COPIED_SHARE = 0.8  # of the free host memory that copies may take


def copies_fit(copies_bytes: float, free_bytes: float) -> bool:
    """Return whether a save may be copied to the host whole. Both of one rank, or both of all ranks."""
    return copies_bytes <= COPIED_SHARE * free_bytes
