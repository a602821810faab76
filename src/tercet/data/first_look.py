"""The first look at files that nobody has described yet: what their rows are, how they are read, how much text they hold.

A recipe is written by what is seen here (`tercet init`), and what preparing would refuse is refused in its words.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tercet.data import corpus
from tercet.data.corpus import Findings
from tercet.data.rows import Fault
from tercet.data.sources import Source, find
from tercet.spec.recipe import SourceSection

LOOKED_BYTES = 16_000_000  # of text; of more, the rest is taken to be like its beginning
FAULT_BYTES = 200  # what a row that cannot be used counts for, so that a file of nothing else comes to an end
FRACTION = 0.05  # held out, as far as it decides how plain text is cut into documents


@dataclass
class FirstLook:
    """What was seen. `sources` have the `map` that reads them; `documents` are different ones, up to where it looked."""

    sources: list[Source] = field(default_factory=list)
    documents: int = 0
    chats: int = 0
    unusable: int = 0
    text_bytes: int = 0  # UTF-8; of files that were not read to their end, the files' own
    whole: bool = True


@dataclass
class _Seen:
    findings: Findings = field(default_factory=Findings)
    faults: list[str] = field(default_factory=list)
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    cure: dict[str, str] | None = None
    text_bytes: int = 0
    whole: bool = True


def look(paths: Sequence[str], key: str) -> FirstLook:
    """Return what files, folders or globs hold; `key` names them in messages.

    Raises InputError as `find` does, and where no row of a source could be used, in the words of preparing.
    """
    found, hashes = FirstLook(), set[int]()
    sources = [find(SourceSection(path=path), f"{key} {n}") for n, path in enumerate(paths, 1)]
    part = corpus.part_characters(sources, FRACTION)
    for source in sources:
        source, seen = _usable(source, part, LOOKED_BYTES - found.text_bytes)
        found.sources.append(source)
        found.chats += seen.findings.chats
        found.unusable += seen.findings.dropped.total()
        found.text_bytes += seen.text_bytes if seen.whole else max(source.bytes, seen.text_bytes)
        found.whole = found.whole and seen.whole
        hashes.update(seen.hashes)
    found.documents = len(hashes)
    return found


def _usable(source: Source, part: int, room: int) -> tuple[Source, _Seen]:
    """Return a source with the map under which rows of it can be used, and what was seen of it."""
    seen = _seen_of(source, part, room)
    if not seen.findings.kept and seen.cure:
        mapped = replace(source, section=source.section.model_copy(update={"map": seen.cure}))
        if (again := _seen_of(mapped, part, room)).findings.kept:
            return mapped, again
    if not seen.findings.kept and source.bytes:
        corpus.stop({"train": seen.findings}, seen.faults, "stop", [source])
    return source, seen


def _seen_of(source: Source, part: int, room: int) -> _Seen:
    """Read up to `room` bytes of text of a source, and of each one at least its first row."""
    seen = _Seen()
    for file in source.files:
        for row in file.read(source.reading(part)):
            corpus.note(row, file, seen.findings, array("b"), seen.hashes, seen.faults, sections=True)
            if isinstance(row, Fault):
                seen.cure = seen.cure or row.cure
                room -= FAULT_BYTES
            else:
                size = len(row.text.encode())
                seen.text_bytes += size
                room -= size
            if room <= 0:
                seen.whole = False
                return seen
    return seen
