"""What training needs of the system. Imports nothing that Windows lacks."""

from __future__ import annotations

import sys

from tercet.errors import InputError


def require_unix() -> None:
    """Raise InputError on Windows: ranks are processes that signals, locks and sockets of Unix hold together."""
    if sys.platform == "win32":
        raise InputError(
            "training needs Linux or macOS; on Windows it runs inside WSL (Windows Subsystem for Linux)",
            "Install it with: wsl --install; then tercet there. plan, prepare, report and generate work here.",
        )
