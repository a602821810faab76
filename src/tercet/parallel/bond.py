"""The bond between a process and the one that started it: a child never outlives its parent. Loads no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """End this process when process `parent` ends, however that happens (SIGKILL included).

    `parent` is the number that the parent handed down, not getppid(): a parent that ended while this process was
    still importing has left it to somebody else, and that is found here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)

    def watch() -> None:  # for systems without that signal
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
