"""The console line of a step."""

from __future__ import annotations

import pytest

from tercet.training.line import full_step_seconds, step_line

FIELDS = {
    "loss": 2.5,
    "grad_norm": 0.75,
    "lr": 3e-4,
    "seconds": 2.0,
    "tokens_per_second": 1500.0,
    "memory_bytes": 3 * 2**30,
}


def test_it_holds_what_people_watch():
    line = step_line(FIELDS, 0.5)
    for words in ("loss 2.5000", "norm 0.75", "lr 0.0003", "1.5 k tokens/s (25% of the limit)", "3.0 GiB"):
        assert words in line
    assert len(line) < 90


def test_an_unknown_limit_is_left_out():
    assert full_step_seconds(None) is None and full_step_seconds({"mfu": None, "step_seconds": 10.0}) is None
    assert full_step_seconds({"mfu": 0.25, "step_seconds": 2.0}) == pytest.approx(0.5)
    assert "limit" not in step_line(FIELDS, None)
