"""Encode a stream of texts on all cores, in batches, and long ones in pieces with an unchanged result.

A long text is cut where words meet. Each cut is then verified: the text around it is encoded once more, and
the tokens on both sides must be the ones that the two pieces gave, with a token boundary right at the cut.
Inside a piece every pair of neighbours is what the tokenizer produces, so agreement across the cut makes
the joined tokens those of the uncut text (for byte-pair encoding: a sequence whose neighbouring pairs all
stand is the encoding). Where a cut does not hold, the two pieces are encoded again as one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tercet.data.encoders import Encoders, TextJob
from tercet.data.tokenizer import Tokenizer

PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20
BATCH_PARTS = 1 << 13
_WINDOW = 256  # characters looked at on each side of a cut
_EDGE = 64  # of these, the outermost: the window cuts words there, so their tokens prove nothing
_LETTER = r"[^\W\d_]"
# Places to cut, best first: at a space between two words; in front of a line or a mark between letters, for
# scripts without spaces; between two letters. Never inside digits or white space, which are read in groups.
_PLACES = tuple(
    re.compile(p)
    for p in (
        rf"(?<={_LETTER}) (?={_LETTER})",
        rf"(?<={_LETTER})(?=[\n。，、；：！？]{_LETTER})",
        rf"(?<={_LETTER})(?={_LETTER})",
    )
)


@dataclass(slots=True)
class TextPiece:
    """A text, or a stretch of one. `first` and `last`: the document begins, ends here. `tag` is the
    caller's.
    """

    text: str
    first: bool
    last: bool
    tag: Any = None
    opening: Any = None  # when parts were joined: the tag of the one with which the document began


@dataclass(slots=True)
class Encoded:
    """Ids (uint32) of a document or a stretch of one; `tag` is that of the last part in it.

    `opening` is the tag of the part with which the document began.
    """

    ids: np.ndarray
    first: bool
    last: bool
    tag: Any
    opening: Any


def encode_stream(
    tokenizer: Tokenizer, parts: Iterable[TextPiece], piece: int = PIECE_CHARACTERS, characters: int = 0
) -> Iterator[Encoded]:
    """Yield the ids of every part in order; parts longer than `piece` come out in several.

    `characters`: about how much text will come; a large one is shared with other processes. In memory are the
    batches being encoded, one done and one being read, unless one document cannot be cut (see `joint`): that one
    is held whole.
    """
    join = _Joiner(tokenizer)
    running: deque[tuple[list[TextPiece], Future[list[np.ndarray]]]] = deque()
    with Encoders(TextJob(tokenizer), characters) as encoders:
        for batch in batches(_cut(parts, piece, join.space), BATCH_CHARACTERS):
            running.append((batch, encoders.submit([p.text for p in batch])))
            if len(running) > encoders.count:
                done, future = running.popleft()
                yield from join(done, future.result())
        for done, future in running:
            yield from join(done, future.result())


def joint(tokenizer: Tokenizer) -> str | None:
    """Return how pieces of a text meet: "keep" the space in front of the second, "drop" it, or None: they
    do not.

    A tokenizer that puts a space in front of every text (as SentencePiece does) must get the second piece
    without its own.
    """
    whole, left, kept, dropped = (ids.tolist() for ids in tokenizer.encode(["the cat", "the", " cat", "cat"]))
    if whole == left + kept:
        return "keep"
    return "drop" if whole == left + dropped else None


def batches(parts: Iterable[TextPiece], characters: int) -> Iterator[list[TextPiece]]:
    """Yield parts in lists of about `characters`."""
    batch: list[TextPiece] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= characters or len(batch) >= BATCH_PARTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut(parts: Iterable[TextPiece], piece: int, space: str | None) -> Iterator[TextPiece]:
    """Re-cut documents: whole ones up to 2 × `piece` characters pass, longer ones are cut at good places.

    The borders of the incoming parts vanish; they were chosen without regard to tokens.
    """
    held, first, opening = "", True, None
    waiting: list[str] = []
    for part in parts:
        if part.first and part.last and len(part.text) <= 2 * piece:
            yield part
            continue
        if part.first:
            held, first, opening = "", True, part.tag
        # Joined only when there is enough to cut, so that uncuttable text is not copied again and again.
        waiting.append(part.text)
        if not part.last and sum(map(len, waiting)) < max(2 * piece, len(held)):
            continue
        held = "".join((held, *waiting))
        waiting = []
        at = 0
        while space is not None and len(held) - at > 2 * piece:
            end = _place(held, at, at + piece, space)
            if end is None:
                break
            yield TextPiece(held[at:end], first, False, part.tag, opening)
            at, first = (end + 1 if space == "drop" else end), False
        held = held[at:]
        if part.last:
            yield TextPiece(held, first, True, part.tag, opening)
            held = ""


def _place(text: str, start: int, end: int, space: str) -> int | None:
    """Return a place to cut between `start` and `end`, as late as possible, or further on when there is
    none.
    """
    for pattern in _PLACES if space == "keep" else _PLACES[:1]:
        for low in (end - 512, (start + end) // 2):
            found = None
            for match in pattern.finditer(text, max(low, start + 1), end):
                found = match
            if found:
                return found.start()
    match = _PLACES[0].search(text, end)
    return match.start() if match else None


@dataclass(slots=True)
class _Pending:
    """The last piece of an unfinished document. `ids` is None while `texts` holds more than was encoded."""

    texts: list[str]
    ids: np.ndarray | None
    first: bool
    tag: Any
    characters: int
    encoded: int


class _Joiner:
    """Verifies cuts and passes pieces on; keeps one piece back until the cut behind it has been verified."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.space = joint(tokenizer)
        self.gap = " " if self.space == "drop" else ""
        self.pending: _Pending | None = None

    def __call__(self, batch: list[TextPiece], found: list[np.ndarray]) -> Iterator[Encoded]:
        around = self._windows(batch)
        for n, (part, ids) in enumerate(zip(batch, found, strict=True)):
            if part.first and part.last:
                yield Encoded(ids, True, True, part.tag, part.opening or part.tag)
                continue
            if not part.first:
                pending = self.pending
                assert pending is not None
                if pending.ids is None and pending.characters >= 2 * pending.encoded:
                    self._settle(pending)
                if pending.ids is not None and _holds(pending.ids, ids, *around[n]):
                    yield Encoded(pending.ids, pending.first, False, pending.tag, part.opening)
                    self.pending = _Pending([part.text], ids, False, part.tag, len(part.text), len(part.text))
                else:
                    pending.texts.append(self.gap + part.text)
                    pending.characters += len(part.text) + len(self.gap)
                    pending.ids = None
            else:
                self.pending = _Pending([part.text], ids, True, part.tag, len(part.text), len(part.text))
            if part.last:
                pending = self.pending
                assert pending is not None
                if pending.ids is None:
                    self._settle(pending)
                assert pending.ids is not None
                yield Encoded(pending.ids, pending.first, True, part.tag, part.opening)
                self.pending = None

    def _settle(self, pending: _Pending) -> None:
        """Encode a piece that has grown. It has at least doubled since the last time, so the work stays
        linear.
        """
        pending.texts = ["".join(pending.texts)]
        pending.ids = self.tokenizer.encode(pending.texts)[0]
        pending.encoded = pending.characters

    def _windows(self, batch: list[TextPiece]) -> dict[int, tuple[Any, ...]]:
        """Return, per part that continues a document, what the text around its cut gives when encoded at
        once.
        """
        texts, places = {}, {}
        for n, part in enumerate(batch):
            if part.first:
                continue
            # The piece before, even if it has been joined to others since: its last characters are the same.
            before = batch[n - 1].text if n else self.pending.texts[-1] if self.pending else ""
            left, right = before[-_WINDOW:], self.gap + part.text[:_WINDOW]
            texts[n] = left + right
            low = _EDGE if len(before) > _WINDOW else 0
            high = len(texts[n]) - (_EDGE if len(part.text) > _WINDOW else 0)
            places[n] = (len(left), low, high)
        encoded = self.tokenizer.encode_placed(list(texts.values())) if texts else []
        return {n: (*found, *places[n]) for n, found in zip(texts, encoded, strict=True)}


def _holds(
    left: np.ndarray,
    right: np.ndarray,
    ids: list[int],
    ranges: list[tuple[int, int]],
    cut: int,
    low: int,
    high: int,
) -> bool:
    """Say whether the window's tokens meet at `cut` and are those of the pieces on both sides.

    `ids`, `ranges`: the window's tokens and the characters they cover; only tokens within [low, high) count.
    """
    split = next((n for n, (start, _) in enumerate(ranges) if start >= cut), len(ranges))
    if any(end > cut for _, end in ranges[:split]) or any(start < cut for start, _ in ranges[split:]):
        return False
    before = sum(start >= low for start, _ in ranges[:split])
    after = sum(end <= high for _, end in ranges[split:])
    if not 0 < before <= len(left) or not 0 < after <= len(right):
        return False
    return (
        left[-before:].tolist() == ids[split - before : split] and right[:after].tolist() == ids[split : split + after]
    )
