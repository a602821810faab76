"""The cards that are here and that a run may use: their own memory, and what others hold of it.

Asks nvidia-smi and loads no torch. Which cards a program sees is CUDA's rule (CUDA C++ Programming Guide, "CUDA
Environment Variables"); numbers are nvidia-smi's, for ranks are started with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "driver_version",
    "power.limit",
)
MIB = 2**20
INSTALL_FOR_CARDS = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
CardFields = dict[str, str]


def all_cards() -> list[CardFields]:
    """Return one row per card of this machine, whether or not it may be used; [] without nvidia-smi."""
    text = _ask(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    cells = ([cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip())
    return [dict(zip(FIELDS, row, strict=False)) for row in cells]


def detect_gpus(environment: Mapping[str, str] = os.environ) -> list[CardFields]:
    """Return one row per card that a run started here sees, in the order of its ranks."""
    return visible(all_cards(), environment.get("CUDA_VISIBLE_DEVICES"), mig_devices)


def visible(
    rows: list[CardFields], wanted: str | None, slices: Callable[[], list[CardFields]] = list
) -> list[CardFields]:
    """Return the rows that CUDA_VISIBLE_DEVICES leaves: numbers, UUIDs (or their beginnings), slices of a card.

    As CUDA reads it: what follows the first name of no card is left out, and a card named twice hides all.
    """
    if wanted is None:
        return rows
    found: list[CardFields] = []
    for token in (part.strip() for part in wanted.split(",")):
        row = _named(rows, token, slices)
        if row is None:
            break
        found.append(row)
    names = [row["uuid"] for row in found]
    return found if len(set(names)) == len(names) else []


def _named(rows: list[CardFields], token: str, slices: Callable[[], list[CardFields]]) -> CardFields | None:
    if re.fullmatch(r"\d+", token):
        return next((row for row in rows if row["index"] == str(int(token))), None)
    if token.startswith("MIG-"):
        fits = [s for s in slices() if s["uuid"].startswith(token)]
        if len(fits) != 1:
            return None
        parent = next((row for row in rows if row["uuid"] == fits[0]["parent"]), {})
        return {**parent, **fits[0], "memory.used": "0"}
    if not token.lower().startswith("gpu-"):
        return None
    fits = [row for row in rows if row["uuid"].lower().startswith(token.lower())]
    return fits[0] if len(fits) == 1 else None


def mig_devices() -> list[CardFields]:
    """Return the slices of cards in MIG mode: uuid, parent's uuid, name with its profile, memory by the profile."""
    found, parent, card = [], "", ""
    for line in _ask("-L").splitlines():
        if match := re.match(r"GPU \d+: (.+) \(UUID: (GPU-[^)]+)\)", line):
            card, parent = match[1], match[2]
        elif match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line):
            gigabytes = re.search(r"(\d+)gb", match[1])
            memory = str(int(gigabytes[1]) * 1024) if gigabytes else "[N/A]"
            row = {"uuid": match[2], "parent": parent, "name": f"{card} MIG {match[1]}", "memory.total": memory}
            found.append(row)
    return found


def bytes_of(row: CardFields, field: str) -> int | None:
    """Return a memory field in bytes, or None where the driver does not say."""
    text = row.get(field, "")
    return int(text) * MIB if text.isdigit() else None


def _ask(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout
