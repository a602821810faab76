"""C05: a rank that the kernel ends is reported as such, with the machine's memory, and not as a hang."""

from __future__ import annotations

import psutil
import pytest

from tercet.units import show_bytes
from tests.deepspeed_tiny import needs_deepspeed


@needs_deepspeed
@pytest.mark.slow
def test_signal_9_in_an_offloaded_run(cli):
    cli.inject("""
        if RANK == 1:
            import os, signal, threading, time
            def watch():
                while not os.path.exists("run/events.jsonl"):
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=watch, daemon=True).start()
    """)
    out = cli.run(
        "train",
        "small.yaml",
        "strategy.engine=deepspeed",
        "strategy.zero=2",
        "strategy.offload.optimizer=cpu",
        "train.steps=2000",
        "--ranks",
        "2",
        "--output",
        "run",
        code=1,
    )
    assert "rank 1 was killed by signal 9 (SIGKILL)" in out.stderr
    assert (
        "because host RAM ran out" in out.stderr
        and f"{show_bytes(psutil.virtual_memory().total)} in this machine" in out.stderr
    )
    assert "tercet train --resume" in out.stderr
