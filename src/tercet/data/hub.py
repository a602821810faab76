"""Tokenizers and data sets by their name on the hub: fetched when need be, from the local cache without a network."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tercet.errors import InputError

PREFIX = "hub:"
_NAME = re.compile(r"(?:hub:)?([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)")


def set_name(text: str) -> tuple[str, str] | None:
    """Return (repository, folder inside it) of a data set's name, or None: `hub:owner/name`, `owner/name/config`."""
    found = _NAME.fullmatch(text)
    return (found[1], found[2].removeprefix("/")) if found and ".." not in text else None


def fetch(name: str, key: str, patterns: Sequence[str], kind: Literal["model", "dataset"], hint: str) -> Path:
    """Return the local copy of a repository's files that match `patterns`, fetched if need be.

    Nothing of a repository is run. Raises InputError that names the recipe's `key` when it cannot be had.
    """
    from huggingface_hub import constants, snapshot_download

    online = not constants.HF_HUB_OFFLINE and _reachable(constants.ENDPOINT)
    try:
        # Without a network the client would repeat itself for a minute; ask once, then look in its cache only.
        found = snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), local_files_only=not online)
        return Path(found)
    except Exception as error:  # network, permission, name: each has its own kind
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = first if online else "the hub cannot be reached and no copy lies in its cache"
        raise InputError(
            f"{key}: {name!r} is no file or folder here, and not to be had from the hub: {why}", hint
        ) from None


def _reachable(endpoint: str) -> bool:
    if any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy knows
    host, _, port = endpoint.partition("://")[2].partition("/")[0].partition(":")
    try:
        socket.create_connection((host, int(port or (443 if endpoint.startswith("https") else 80))), timeout=5).close()
    except OSError:
        return False
    return True


def one_set(folder: Path, name: str, inside: str, key: str, endings: Sequence[str]) -> Path:
    """Return the folder of one data set in a repository. Raises InputError where there are several, or it is not there.

    A repository with several configurations keeps each in a folder of its own; trained together they would be mixed.
    """
    if inside:
        if (folder / inside).is_dir():
            return folder / inside
        there = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        raise InputError(f"{key}: {name} has no folder {inside!r}", f"It has {', '.join(there) or 'none'}.")
    files = [p for p in folder.rglob("*") if p.name.lower().endswith(tuple(endings))]
    tops = sorted({p.relative_to(folder).parts[0] if p.parent != folder else "" for p in files})
    sets = [top for top in tops if top not in ("data", "")]
    if len(sets) > 1:
        raise InputError(f"{key}: {name} holds several sets: {', '.join(sets)}", f"Name one: {PREFIX}{name}/{sets[0]}.")
    return folder
