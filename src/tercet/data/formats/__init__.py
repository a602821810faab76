"""Formats of training files, one module each. A module here is a format; nothing else needs to be told.

Every module has
`SUFFIXES`: the file name endings that suggest it,
`sniff(path, head) -> bool`: whether a file of such an ending really is it (`head`: its first 64 KiB), and
`read(path, reading) -> Iterator[Row | Fault]`: every row with its place, in the file's order.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

from tercet.errors import InputError

HEAD_BYTES = 1 << 16


@cache
def formats() -> dict[str, ModuleType]:
    """Return name -> module of every format."""
    return {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}


@cache
def suffixes() -> frozenset[str]:
    """Return every file name ending that some format claims."""
    return frozenset(s for module in formats().values() for s in module.SUFFIXES)


def detect(path: Path) -> str:
    """Return the name of a file's format, from its ending and its first bytes.

    Raises InputError when no format knows it.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    ending = path.suffix.lower()
    for name, module in formats().items():
        if ending in module.SUFFIXES and module.sniff(path, head):
            return name
    raise InputError(
        f"{path}: no format is known for {ending or 'a file without ending'!r}",
        f"Name it with data.train: [{{path: …, format: …}}], one of {', '.join(formats())}.",
    )
