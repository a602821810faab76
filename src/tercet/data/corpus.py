"""The check before training: every row of every file is read and judged, and the documents are divided.

Nothing is tokenised or trained before the last row has been read. The check keeps 9 bytes a row: a hash of
the text, and a mark that says where the row goes; the texts themselves are read again when they are needed.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tercet.data.chat import MISSING, Chat
from tercet.data.rows import Fault, Row
from tercet.data.sources import File, Source, paths_of
from tercet.data.tokenize import TextPiece
from tercet.errors import InputError, TercetError

TRAIN, VALIDATION, DROPPED = 0, 1, 2
PLACES = 5  # first places kept per reason
_CURE = "would read it"
SHOWN = 10  # faults shown when the check stops
KEPT_BYTES = 16_000_000  # of text files that are read once; larger ones, and compressed ones, are read again
_SECTION = (1 << 11, 1 << 16)  # least and most characters of a section of plain text


class NothingLeft(InputError):
    """No row is left to train on."""


@dataclass
class Findings:
    """What the check found in a set of sources. `dropped` counts rows by reason, `places` has the first
    few.
    """

    rows: int = 0
    kept: int = 0
    chats: int = 0
    characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)


@dataclass(frozen=True)
class Tag:
    """Where a part comes from: index of its source, file, line. `stream`: plain text, always split."""

    source: int
    file: File
    line: int
    stream: bool
    begins: bool  # a new text begins here, as opposed to a text that goes on behind a held-out section
    ends: bool
    chat: bool = False


@dataclass
class Corpus:
    """The checked sources. `marks[s]` has one entry per row of source s, in the order of reading."""

    train: Sequence[Source]
    validation: Sequence[Source]
    fraction: float | None
    part_characters: int
    marks: list[array[int]]
    findings: dict[str, Findings]  # "train", "validation"
    duplicates: int
    overlap: int
    late: Counter[int] = field(default_factory=Counter)  # rows dropped after the check, by side
    kept: dict[int, list[Row | Fault]] | None = None  # by id(file): what the check has read

    @property
    def chats(self) -> int:
        """How many rows are chats."""
        return sum(f.chats for f in self.findings.values())

    @property
    def has_texts(self) -> bool:
        return any(f.kept > f.chats or f.seen["kind: text"] for f in self.findings.values())

    def words(self, side: int) -> Iterator[str]:
        """Yield what is said on one side, texts as they are, of chats the contents: what a tokenizer is trained on."""
        for part in self.documents(side):
            if part.tag.chat:
                yield from (m["content"] for m in Chat.from_text(part.text).messages)
            else:
                yield part.text

    def documents(self, side: int) -> Iterator[TextPiece]:
        """Yield the texts of one side, in the order of the files, tagged with a Tag."""
        for index, source in enumerate([*self.train, *self.validation]):
            if TRAIN in self.marks[index] if side == TRAIN else VALIDATION in self.marks[index]:
                yield from self._of_source(index, source, side)

    def _of_source(self, index: int, source: Source, side: int) -> Iterator[TextPiece]:
        marks, n = self.marks[index], 0
        for file in source.files:
            inside = False
            again = file.read(source.reading(self.part_characters))
            for row in again if self.kept is None else self.kept[id(file)]:
                if n >= len(marks) or (marks[n] == DROPPED) != isinstance(row, Fault):
                    raise TercetError(f"{file.name} changed while it was being read", "Start again.")
                mark, n = marks[n], n + 1
                if mark != side or not isinstance(row, Row):
                    inside = False
                    continue
                # A text file whose sections go to both sides is trained in stretches, from one gap to the
                # next.
                last = row.ends or marks[n] != side
                tag = Tag(index, file, row.line, file.format == "text", row.starts, row.ends, row.chat)
                yield TextPiece(row.text, not inside, last, tag)
                inside = not last


def check(
    train: Sequence[Source],
    validation: Sequence[Source] | float | None,
    bad_rows: str,
    progress: Callable[[int], None] = lambda _: None,
) -> Corpus:
    """Read every row of every source and divide the documents into training and validation.

    `validation`: a fraction of the training documents, chosen by the hash of their text, so that equal
    texts land on one side; or sources of their own; or None. `progress(n)` is told every file's bytes once
    it has been read. Raises InputError that lists the first faults and all counts when `bad_rows` is
    "stop", when a file cannot be read to its end, or when no usable row is left.
    """
    fraction = validation if isinstance(validation, float) else None
    held: Sequence[Source] = [] if validation is None or fraction else validation  # type: ignore[assignment]
    part = part_characters(train, fraction)
    findings = {"train": Findings(), "validation": Findings()}
    marks: list[array[int]] = []
    hashes: list[array[int]] = []
    faults: list[str] = []
    files = [f for s in [*train, *held] for f in s.files]
    small = sum(f.bytes for f in files) <= KEPT_BYTES and not any(map(_packed, files))
    kept: dict[int, list[Row | Fault]] | None = {} if small else None
    for index, source in enumerate([*train, *held]):
        own = findings["train" if index < len(train) else "validation"]
        mark, digest = array("b"), array("Q")
        for file in source.files:
            reading = source.reading(part)
            rows: Iterable[Row | Fault] = file.read(reading)
            if kept is not None:
                rows = kept[id(file)] = list(rows)
            for row in rows:
                note(row, file, own, mark, digest, faults, fraction is not None)
            own.seen.update(reading.seen)
            progress(file.bytes)
        if index >= len(train):
            mark = array("b", [DROPPED if m == DROPPED else VALIDATION for m in mark])
        marks.append(mark)
        hashes.append(digest)
    stop(findings, faults, bad_rows, train)
    kinds = [np.frombuffer(h, dtype=np.uint64) if h else np.zeros(0, np.uint64) for h in hashes]
    own_hashes = np.concatenate(kinds[: len(train)]) if train else np.zeros(0, np.uint64)
    different = np.unique(own_hashes)
    if fraction:
        _hold_out(different, fraction, marks, kinds, train)
    overlap = sum(int(np.isin(k, different).sum()) for k in kinds[len(train) :])
    duplicates = int(own_hashes.size - different.size)
    return Corpus(train, held, fraction, part, marks, findings, duplicates, overlap, kept=kept)


def _packed(file: File) -> bool:
    """Return whether a file's size says nothing of how much text is in it."""
    return file.format in ("parquet", "arrow") or file.path.suffix in (".gz", ".zst")


def part_characters(train: Sequence[Source], fraction: float | None) -> int:
    """Return in what parts plain text is read: large ones, or sections small enough to hold a fraction of
    them out.

    Sixteen sections for the held-out part are a fair sample of a text; sections shorter than a page are none.
    """
    if not fraction:
        return 1 << 20
    size = sum(f.bytes for s in train for f in s.files if f.format == "text")
    return int(min(max(size * fraction / 16, _SECTION[0]), _SECTION[1]))


def note(
    row: Row | Fault,
    file: File,
    own: Findings,
    mark: array[int],
    digest: array[int],
    faults: list[str],
    sections: bool,
) -> None:
    """Enter a row into `own`, `mark` and `digest`; a fault also into `faults`, as its sentence.

    `sections`: each part of a text counts as a document. Raises InputError for a fault that cannot be skipped.
    """
    if isinstance(row, Fault):
        own.rows += 1
        place = f"{file.name}, line {row.line}, column {row.column}"
        own.drop(row.reason, place)
        mark.append(DROPPED)
        sentence = f"{place}: {row.reason}: {row.detail}" + (f"  >> {row.excerpt}" if row.excerpt else "")
        if row.fatal:
            raise InputError(sentence, "This cannot be skipped: what follows it in the file cannot be read.")
        if len(faults) < SHOWN and not (_CURE in row.detail and any(row.detail in f for f in faults)):
            faults.append(sentence)  # one way to read a file's columns is said once
        return
    if row.ends or sections:
        own.rows += 1
        own.kept += 1
    own.chats += row.chat
    own.characters += len(row.text)
    mark.append(TRAIN)
    digest.append(int.from_bytes(hashlib.blake2b(row.text.encode(), digest_size=8).digest(), "little"))


def _by_name(reasons: Counter[str], faults: list[str]) -> str:
    """Return the end of a hint: how columns are named, where one is missing."""
    if MISSING not in reasons:
        return "."
    found = next((m[1] for f in faults if (m := re.search(rf"map: (\{{.*?\}}) {_CURE}", f))), "{text: …}")
    return (
        f", or name their columns with data.train: [{{path: …, map: {found}}}], or on the command line "
        f"'data.train.0.map={found}' (0: the first source)."
    )


def stop(findings: dict[str, Findings], faults: list[str], bad_rows: str, train: Sequence[Source]) -> None:
    """Raise InputError for faults where bad rows stop, and NothingLeft where no row is left."""
    total = sum(sum(f.dropped.values()) for f in findings.values())
    rows = sum(f.rows for f in findings.values())
    if total and bad_rows == "stop":
        reasons = sum((f.dropped for f in findings.values()), Counter())
        more = [f"… and {total - len(faults)} more"] if total > len(faults) else []
        raise InputError(
            "\n".join([f"{total} of {rows} rows cannot be used ({counted(reasons)}):", *faults, *more]),
            "Mend them, or set data.bad_rows=skip to leave them out."
            if all(f.kept or not f.rows for f in findings.values())
            else "No row would be left without them, so skipping is no way: mend the rows" + _by_name(reasons, faults),
        )
    own = findings["train"]
    if own.kept == 0:
        why = f"{own.rows} rows read, dropped: {counted(own.dropped)}" if own.rows else "the files hold no rows"
        where = paths_of(train)
        raise NothingLeft(f"data.train: no row is left to train on ({why}): {where}", "Give files that hold texts.")


def counted(reasons: Counter[str]) -> str:
    """Return "3 bad JSON, 1 null text"."""
    return ", ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none"


def _hold_out(
    different: np.ndarray, fraction: float, marks: list[array[int]], kinds: list[np.ndarray], train: Sequence[Source]
) -> None:
    """Mark the documents with the smallest hashes as validation: a fraction of the different texts, at
    least one.

    A hash is as good as a lot, and a document keeps its side when others come or go (but for those at the
    border).
    """
    if different.size < 2:
        raise InputError(
            f"data.validation is {fraction}, but there is only {different.size} different document to divide: "
            f"{paths_of(train)}",
            "Give data.validation a file of its own, or set it to none.",
        )
    count = min(max(round(fraction * different.size), 1), different.size - 1)
    border = different[count - 1]  # np.unique sorts
    for mark, hashes in zip(marks, kinds, strict=True):
        sides = np.frombuffer(mark, dtype=np.int8)  # shares the array's memory
        sides[np.flatnonzero(sides == TRAIN)[hashes <= border]] = VALIDATION
