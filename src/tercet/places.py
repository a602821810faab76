"""The user's own folders, by the desktop standard (XDG base directories)."""

from __future__ import annotations

import os
from pathlib import Path

from tercet.errors import InputError

_DEFAULTS = {"XDG_CONFIG_HOME": ".config", "XDG_CACHE_HOME": ".cache"}


def config_folder() -> Path | None:
    """Return where settings of this user lie, or None when this user has no folder of their own."""
    try:
        return _folder("XDG_CONFIG_HOME")
    except InputError:
        return None


def cache_folder() -> Path:
    """Return where what can be made again lies. Raises InputError when this user has no folder of their own."""
    return _folder("XDG_CACHE_HOME")


def _folder(variable: str) -> Path:
    if os.path.isabs(given := os.environ.get(variable, "")):  # a relative one is to be ignored, says the standard
        return Path(given) / "tercet"
    try:
        return Path.home() / _DEFAULTS[variable] / "tercet"
    except RuntimeError:  # HOME is not set, and the user's number has no entry: usual in containers
        who = f"user number {os.getuid()}" if hasattr(os, "getuid") else "this user"
        raise InputError(
            f"{who} has no home folder: HOME is not set and the system knows no such user",
            f"Set HOME, or {variable} to a folder that can be written (prepared data alone: data.cache).",
        ) from None
