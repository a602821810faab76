"""G29: recompute that keeps operators by name cannot be compiled: refused before it runs, with what can."""

from __future__ import annotations

from tercet.spec.strategy import Strategy, Work, why_not
from tests.tiny import tiny_model


def test_compiling_where_operators_are_kept_by_name_is_refused():
    (why,) = why_not(tiny_model(), Strategy(compile=True, recompute="selective"), Work(16, 4))
    assert "strategy.compile" in why and "recompute none, full or every-n" in why
    assert not why_not(tiny_model(), Strategy(compile=True), Work(16, 4))
