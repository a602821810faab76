"""The cache of prepared data: one folder per key, complete or not there at all; one process fills it at a
time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from tercet.errors import TercetError
from tercet.locks import FileLock
from tercet.places import cache_folder

MANIFEST = "manifest.json"
_SAY_EVERY_SECONDS = 15.0
_ASK_EVERY_SECONDS = 0.2


def folder_of(setting: str | None) -> Path:
    """Return the cache folder: data.cache, or tercet under the user's own cache folder."""
    if setting is not None:
        return Path(setting).expanduser().absolute()
    return cache_folder()


def key_of(decides: dict[str, Any]) -> str:
    """Return the key of everything that decides the tokens, this room's own code included."""
    digest = hashlib.blake2b(digest_size=10)
    digest.update(orjson.dumps({**decides, "tokenizers": version("tokenizers")}, option=orjson.OPT_SORT_KEYS))
    here = Path(__file__).parent
    for file in sorted(here.rglob("*.py")):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(here).as_posix()} {len(code)} ".encode())
        digest.update(code)
    return digest.hexdigest()


def complete(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder whose files are all there in their full size, else None."""
    try:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
        sizes = manifest["files"]
        good = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if good else None


def fill(
    cache: Path, key: str, build: Callable[[Path], dict[str, Any]], say: Callable[[str], None]
) -> tuple[dict[str, Any], bool]:
    """Return (manifest, whether it was there already), building the folder when it is not.

    Any number of processes may call this at once: one builds, the others wait for its lock without a
    collective and say so. The lock is the kernel's and goes with its process. `build` fills a folder of
    another name, which is renamed when complete; what a killed process left under such a name is removed by
    the next. Raises TercetError when the disk is full or the cache cannot be written.
    """
    final = cache / key
    if manifest := complete(final):
        return manifest, True
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{key}.lock")
        _wait(lock, key, say)
    except OSError as error:
        raise TercetError(f"the cache folder {cache} cannot be written: {error}", "Set data.cache.") from None
    scratch = cache / f"{key}.building"
    try:
        if manifest := complete(final):
            return manifest, True
        # Only the holder of the lock builds, so whatever lies here was left by a process that is gone.
        shutil.rmtree(scratch, ignore_errors=True)
        if final.exists():
            say(f"prepared data {key} is damaged and is made again")
            shutil.rmtree(final)
        scratch.mkdir()
        manifest = build(scratch)
        manifest["files"] = _sizes(scratch)
        _write(scratch / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        scratch.rename(final)
        return manifest, False
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(cache).free
            raise TercetError(
                f"the disk is full: prepared data did not fit into {cache} ({free} bytes are free)",
                "Make room, or set data.cache to a folder on another disk.",
            ) from None
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def _wait(lock: FileLock, key: str, say: Callable[[str], None]) -> None:
    started = said = time.monotonic()
    first = True
    while not lock.acquire():
        now = time.monotonic()
        if first or now - said >= _SAY_EVERY_SECONDS:
            said, first = now, False
            say(f"waiting for {lock.holder()}, which prepares the data ({key}), {now - started:.0f} s so far")
        time.sleep(_ASK_EVERY_SECONDS)


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in files}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
