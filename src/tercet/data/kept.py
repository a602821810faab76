"""What a run was begun with, kept in its folder: a resumed run uses its own tokenizer and knows data that has changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tercet.data import corpus
from tercet.data.sources import Source
from tercet.errors import InputError
from tercet.units import show_bytes

FILE, TOKENIZER = "sources.json", "tokenizer"
SHOWN = 5


@dataclass(frozen=True)
class RunData:
    """`key`: of the prepared data. `tokenizer`: hash of the recipe's tokenizer, or "train". `files`: a list per group
    (train, validation) of name, bytes and hash, in the order of reading. `rows`: how many were read."""

    folder: Path
    key: str
    tokenizer: str
    files: dict[str, list[dict[str, Any]]]
    rows: int
    accept: bool = False

    def own_tokenizer(self) -> Path:
        """Return where the run's own tokenizer lies: its tokenizer.json, or the folder when it has another form."""
        folder = self.folder / TOKENIZER
        file = folder / "tokenizer.json"
        return file if file.is_file() else folder


def read_kept(run: Path, accept: bool) -> RunData | None:
    """Return what the run in this folder was begun with; None when it has not prepared its data yet.

    `accept`: whether changed data is to be trained on.
    """
    try:
        content = orjson.loads((run / FILE).read_bytes())
        return RunData(run, content["key"], content["tokenizer"], content["files"], content["rows"], accept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{run / FILE} cannot be read: {error}") from None


def keep(run: Path, key: str, decides: str, files: dict[str, Any], rows: int, tokenizer: Path) -> None:
    """Keep what this start trains on. The file comes last: with it, the tokenizer is whole."""
    if not (run / TOKENIZER).is_dir():
        scratch = run / f".{TOKENIZER}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(tokenizer, scratch)
        scratch.rename(run / TOKENIZER)
    content = {"key": key, "tokenizer": decides, "files": files, "rows": rows}
    temporary = run / f".{FILE}.tmp"
    temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    temporary.replace(run / FILE)


def described(train: Sequence[Source], held: object, hashes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return a group's files with their contents' hashes, which come in the order of reading."""
    left = iter(hashes)
    groups = {"train": train, "validation": held if isinstance(held, list) else []}
    return {
        name: [{"name": f.name, "bytes": f.bytes, "blake2b": next(left)} for s in sources for f in s.files]
        for name, sources in groups.items()
    }


def changes(before: dict[str, list[dict[str, Any]]], now: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a sentence per file that differs; none when every content is the same, whatever the files are called."""
    found = []
    for group in now:
        old, new = before.get(group, []), now[group]
        if [f["blake2b"] for f in old] == [f["blake2b"] for f in new]:
            continue
        by_name = {f["name"]: f for f in old}
        for file in new:
            was = by_name.pop(file["name"], None)
            if was is None:
                found.append(f"{file['name']} is new ({show_bytes(file['bytes'])})")
            elif was["blake2b"] != file["blake2b"]:
                found.append(f"{file['name']} has changed ({was['bytes']} bytes before, {file['bytes']} now)")
        found += [f"{name} is gone" for name in by_name]
    return found


def judge(kept: RunData, found: list[str], train: Sequence[Source], held: Any, bad_rows: str) -> str:
    """Return what to say of changed data that was accepted. Raises InputError when it was not."""
    try:
        rows = sum(f.rows for f in corpus.check(train, held, bad_rows).findings.values())
        counts = f"{kept.rows} rows before, {rows} now"
    except InputError as error:
        counts = f"{kept.rows} rows before; now: {error.message}"
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    text = f"the data has changed since this run began: {'; '.join(found[:SHOWN])}{more}; {counts}"
    if not kept.accept:
        raise InputError(
            text,
            "Restore the files, or resume with --accept-changed-data: the run keeps its tokenizer, but its rows are dealt "
            "anew, so some that it has seen come again in this epoch and others do not come.",
        )
    return (
        f"{text}. Accepted: the tokenizer stays the run's own; rows are dealt anew, the positions of rows already "
        "trained are lost"
    )
