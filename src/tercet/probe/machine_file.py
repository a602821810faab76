"""Writes the machine file: what doctor measured, for plan and train. Read by tercet.spec.machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tercet.errors import InputError, TercetError
from tercet.spec.machine import machine_file, read_machine_file


def update(content: dict[str, Any], path: Path | None = None) -> Path:
    """Merge `content` into the machine file and return its path. Raises TercetError when it cannot be written."""
    path = path or machine_file()
    if path is None:
        raise InputError("this user has no home folder to remember it in", "Set HOME, or XDG_CONFIG_HOME to a folder.")
    merged = {**(read_machine_file(path) or {}), **content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(orjson.dumps(merged, option=orjson.OPT_INDENT_2))
        temporary.replace(path)
    except OSError as error:
        raise TercetError(f"{path} cannot be written: {error.strerror}") from None
    return path
