"""What a run is doing now, from the end of its events: for whoever asks it to stop."""

from __future__ import annotations

import math
import statistics
import time

from tercet.errors import InputError
from tercet.spec.run_folder import RunFolder
from tercet.units import show_seconds

RECENT_STEPS = 20
LONG_STEP_SECONDS = 5.0  # from which on a request to stop is looked for between micro-batches too
AFTER_THE_STEPS = "stopping: every step is done; ends when what is being written is whole, or at once where it waits; again to end now"
BEFORE_A_STEP = "stopping before the first step of this start has ended; again to end at once"


def stopping_line(run: RunFolder, since: float) -> str:
    """Return what happens between a request to stop and the end. `since`: when this start's ranks were started."""
    try:
        events = [e for e in run.read_events() if e["time"] >= since]
    except InputError:
        events = []
    steps = [e for e in events if e["event"] == "step"]
    total_steps = next((e["total_steps"] for e in reversed(events) if "total_steps" in e), math.inf)
    if not steps:
        return BEFORE_A_STEP
    if steps[-1]["step"] >= total_steps:
        return AFTER_THE_STEPS
    return sentence(steps[-1]["step"], [e["seconds"] for e in steps], time.time() - steps[-1]["time"])


def sentence(done: int, seconds: list[float], elapsed: float) -> str:
    """`done` steps took `seconds` each (the newest last); the step that runs began `elapsed` seconds ago."""
    usual = statistics.median(seconds[-RECENT_STEPS:])
    left = max(0.0, usual - elapsed)
    about = f"about {show_seconds(left)}" if left >= 1 else "at once"
    if usual >= LONG_STEP_SECONDS:
        return (
            f"stopping: step {done + 1} is given up where its next micro-batch begins, or ends ({about}), then saving; "
            "again to discard what is not saved"
        )
    return f"stopping: finishing step {done + 1} ({about}), then saving; again to discard what is not saved"
