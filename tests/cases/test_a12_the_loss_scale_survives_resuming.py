"""A12: scale and growth counter are part of the checkpoint; the history after resuming is the uninterrupted one.

DeepSpeed's own scaler, without a card: it is plain arithmetic, driven here by a recorded pattern of overflows.
"""

from __future__ import annotations

import json

import pytest

from tests.deepspeed_tiny import needs_deepspeed

pytestmark = needs_deepspeed
OVERFLOWS = {1, 2, 3, 13, 14}


def scaler():
    from tercet.engine.deepspeed.engine import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(2.0**16, 3, 1.0, 1, False)  # scale, window, smallest, hysteresis


def history(one, steps: range) -> list[float]:
    found = []
    for step in steps:
        one.update_scale(step in OVERFLOWS)
        found.append(one.cur_scale)
    return found


@pytest.fixture(autouse=True)
def quiet_ranks(monkeypatch):
    """The scaler asks for the rank before it logs; there is no process group here."""
    import deepspeed.comm

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda *a: 1)


@pytest.mark.parametrize("saved_at", [2, 8, 13])
def test_the_history_after_resuming_is_the_same(saved_at):
    from tercet.engine.deepspeed.state import restore_scaler, scaler_state

    whole = history(scaler(), range(1, 21))
    assert len(set(whole)) >= 3, "the pattern must move the scale both ways"
    first = scaler()
    history(first, range(1, saved_at + 1))
    stored = json.loads(json.dumps(scaler_state(first)))  # as it lies in a checkpoint's metadata
    second = scaler()
    restore_scaler(second, stored)
    assert history(second, range(saved_at + 1, 21)) == whole[saved_at:]


def test_a_scaler_that_starts_anew_would_differ():
    whole = history(scaler(), range(1, 21))
    assert history(scaler(), range(9, 21)) != whole[8:]
