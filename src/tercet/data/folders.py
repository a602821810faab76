"""Which files of a folder are a source's texts. Every file is either taken or passed over with a reason."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tercet.data import formats

# What `save_to_disk` and the hub put beside the rows.
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
TEXTS = {".txt", ".md", ".text", ".rst", ".log"}
# The hub's rule: a split's name stands in a path between marks, as in data/train-00000-of-00002.parquet.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NAMED = {split: re.compile(rf"(?:^|[-._ /])(?:{'|'.join(w)})(?:[-._ /]|$)", re.I) for split, w in _SPLITS.items()}


@dataclass
class FolderFiles:
    """`taken` in the order of their paths; `passed` has (path, reason) of everything else."""

    taken: list[Path] = field(default_factory=list)
    passed: list[tuple[Path, str]] = field(default_factory=list)


def search(folder: Path, side: str) -> FolderFiles:
    """Return what a folder holds for `side` ("train" or "validation"), through all levels and links.

    Tables (JSON Lines, Parquet, …) come before texts: beside them README.md and LICENSE.txt are no rows. Where file
    names tell splits, the side's own is taken.
    """
    found = FolderFiles()
    files = sorted(_walk(folder, found))
    known = formats.suffixes() - {".py"}  # a folder of programs is no folder of texts
    good = []
    for path in files:
        if not os.access(path, os.R_OK):
            found.passed.append((path, "may not be read"))
        elif formats.ending(path) in known and path.name not in _ABOUT:
            good.append(path)
        else:
            found.passed.append((path, "describes the data" if path.name in _ABOUT else "no known format"))
    tables = [p for p in good if formats.ending(p) not in TEXTS]
    if tables:
        found.passed += [(p, "a text beside tables") for p in good if p not in tables]
    found.taken = _of_split(folder, tables or good, side, found) if tables else good
    return found


def matches(pattern: Path) -> FolderFiles:
    """Return the files that a glob names, each once.

    `**` goes through every folder once, links included; the standard library's would follow a link back to a folder
    again and again.
    """
    found = FolderFiles()
    if "**" not in pattern.parts:
        found.taken = sorted(Path(p) for p in glob.glob(str(pattern)) if os.path.isfile(p))
        return found
    first = next(n for n, part in enumerate(pattern.parts) if glob.has_magic(part))
    base, wanted = Path(*pattern.parts[:first]), pattern.parts[first:]
    if base.is_dir():
        found.taken = sorted(p for p in _walk(base, found) if _matches(p.relative_to(base).parts, wanted))
    found.passed = [(p, why) for p, why in found.passed if not why.startswith("its name")]
    return found


def _matches(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[n:], wanted[1:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def _walk(folder: Path, found: FolderFiles) -> Iterator[Path]:
    """Yield every file below a folder. A folder that was entered before, by whatever link, is not entered again."""
    entered: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            at = here.stat()
            if (at.st_dev, at.st_ino) in entered:
                found.passed.append((here, "a link to a folder that was read already"))
                continue
            entered.add((at.st_dev, at.st_ino))
            inside = sorted(here.iterdir())
        except OSError as error:
            found.passed.append((here, f"may not be read ({error.strerror})"))
            continue
        folders = []
        for path in inside:
            if path.name.startswith("."):
                found.passed.append((path, "its name begins with a dot"))
            elif path.is_dir():
                folders.append(path)
            elif path.is_file():
                yield path
            else:
                found.passed.append((path, "a broken link" if path.is_symlink() else "no file"))
        # Real folders before links, so that a file is named by its own path.
        waiting += sorted(folders, key=lambda p: (not p.is_symlink(), p), reverse=True)


def _of_split(folder: Path, files: list[Path], side: str, found: FolderFiles) -> list[Path]:
    splits = {p: split_of(p.relative_to(folder).as_posix()) for p in files}
    there = set(splits.values()) - {None}
    if len(there) < 2 and not (there == {"train"} and side == "validation"):
        return files
    wanted = ["train"] if side == "train" else ["validation", "test"]
    chosen = next((w for w in wanted if w in there), None)
    if chosen is None:
        return files
    for path, split in splits.items():
        if split != chosen:
            found.passed.append((path, f"belongs to the split {split}" if split else "belongs to no split"))
    return [p for p in files if splits[p] == chosen]


def split_of(path: str) -> str | None:
    """Return the split that a path inside a data set's folder names, or None."""
    stem = path
    for _ in range(2):
        stem = re.sub(r"\.(gz|zst|[a-z]+)$", "", stem, flags=re.I)
    return next((split for split, pattern in _NAMED.items() if pattern.search(stem)), None)
