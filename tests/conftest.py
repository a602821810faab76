"""Shared fixtures: pools of ranks, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """1, 2 and 3 gloo ranks; each starts at its first use."""
    found = {n: Ranks(n) for n in (1, 2, 3)}
    yield found
    for pool in found.values():
        pool.stop()
