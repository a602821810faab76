"""Whether a model's files are still those that a run began with."""

from __future__ import annotations

import hashlib
from pathlib import Path

WHOLE_BYTES, BLOCK_BYTES, EVERY_BYTES = 64 * 2**20, 4096, 2**20
KINDS = ("*.safetensors", "*.bin", "*.gguf")


def fingerprint(place: Path) -> str:
    """Return a hash of the weight files of a folder, or of one file: sizes, and of what is larger than 64 MiB 4 KiB of
    every MiB. Other weights differ in nearly every block; a hash of all would read 15 GB at each start of 7 B.
    """
    files = [place] if place.is_file() else sorted(file for kind in KINDS for file in place.glob(kind))
    found = hashlib.blake2b(digest_size=20)
    for path in files:
        size = path.stat().st_size
        found.update(str(size).encode())
        with path.open("rb", buffering=0) as file:
            if size <= WHOLE_BYTES:
                found.update(file.read())
                continue
            for begin in range(0, size, EVERY_BYTES):
                file.seek(begin)
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()
