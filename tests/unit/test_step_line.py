"""The console line of a step."""

from __future__ import annotations

import pytest

from tercet.training.line import full_speed, step_line

FIELDS = {"loss": 2.5, "grad_norm": 0.75, "lr": 3e-4, "tokens_per_second": 1500.0, "memory_bytes": 3 * 2**30}


def test_it_holds_what_people_watch():
    line = step_line(FIELDS, 6000.0)
    for words in ("loss 2.5000", "norm 0.75", "lr 0.0003", "1.5 k tokens/s (25% of the limit)", "3.0 GiB"):
        assert words in line
    assert len(line) < 90


def test_an_unknown_limit_is_left_out():
    assert full_speed(None) is None and full_speed({"mfu": None, "tokens_per_second": 10.0}) is None
    assert full_speed({"mfu": 0.25, "tokens_per_second": 1000.0}) == pytest.approx(4000)
    assert "limit" not in step_line(FIELDS, None)
