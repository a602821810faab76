"""Formats of training files, one module each (of what a row holds: see `chats`). A module here is a format; nothing
else needs to be told.

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

from tercet.data.compressed import COMPRESSED, UNREADABLE, open_bytes
from tercet.errors import InputError, file_error

HEAD_BYTES = 1 << 16
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = (b"<!doctype html", b"<html")


@cache
def formats() -> dict[str, ModuleType]:
    """Return name -> module of every format."""
    return {
        m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if not m.ispkg
    }


@cache
def suffixes() -> frozenset[str]:
    """Return every file name ending that some format claims."""
    return frozenset(s for module in formats().values() for s in module.SUFFIXES)


def ending(path: Path) -> str:
    """Return a file name's ending in small letters, that of a compression taken off."""
    parts = [s.lower() for s in path.suffixes]
    while parts and parts[-1] in COMPRESSED:
        parts.pop()
    return parts[-1] if parts else ""


def detect(path: Path) -> str:
    """Return the name of a file's format, from its ending and its first bytes.

    Raises InputError when no format knows it, or when something else lies in its place.
    """
    head = head_of(path)
    if head.lstrip()[:20].lower().startswith(_PAGE):
        raise InputError(
            f"{path} is a web page (HTML) in place of a file of rows",
            "It was probably downloaded from a page about the file; get the file itself. format: text trains on it.",
        )
    suffix = ending(path)
    for name, module in formats().items():
        if suffix in module.SUFFIXES and module.sniff(path, head):
            return name
    raise InputError(
        f"{path}: no format is known for {suffix or 'a file without ending'!r}",
        f"Name it with data.train: [{{path: …, format: …}}], one of {', '.join(formats())}.",
    )


def head_of(path: Path) -> bytes:
    """Return a file's first bytes. Raises InputError when it cannot be read, or only points to another."""
    try:
        with open_bytes(path) as file:
            head = file.read(HEAD_BYTES)
    except UNREADABLE as error:
        told = file_error(error) if isinstance(error, OSError) else None
        raise told or InputError(f"{path} cannot be read: {error}") from None
    if head.startswith(_POINTER):
        raise InputError(
            f"{path} is a Git LFS pointer; the file itself was not downloaded",
            "Run git lfs pull where it was cloned.",
        )
    return head
