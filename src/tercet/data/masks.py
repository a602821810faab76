"""From the text of a chat to ids and the weight of each: cut at control tokens, encoded as text, put together again.

Tokenizers look at nothing across a control token, so the stretches between them are encoded by themselves, through the
same stream as all other text. A token is trained when one of its characters is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers

from tercet.data.shards import Palette
from tercet.data.spans import Document, Template
from tercet.data.tokenize import Encoded, TextPiece, encode_stream
from tercet.data.tokenizer import Tokenizer
from tercet.data.words import token_bytes

Span = tuple[int, int, float]


@dataclass
class Masked:
    """A chat's document as it is trained: ids (uint32), and per id the number of its weight in the palette (uint8)."""

    ids: np.ndarray
    trained: np.ndarray
    tag: Any


@dataclass
class _Building:
    """A document whose stretches are being encoded; `parts` has ids and weights in order, None where one is missing."""

    tag: Any
    missing: int
    parts: list[tuple[np.ndarray, np.ndarray] | None] = field(default_factory=list)


@dataclass
class _Stretch:
    """Text between two control tokens; spans count from its begin. `ids`: what of it has been encoded."""

    document: _Building
    place: int
    text: str
    spans: list[Span]
    ids: list[np.ndarray] = field(default_factory=list)


class Masker:
    """Encodes documents of chats."""

    def __init__(self, tokenizer: Tokenizer, template: Template, palette: Palette):
        self.tokenizer, self.template, self.palette = tokenizer, template, palette
        self._bytes = token_bytes(tokenizer.backend, normalized=True) if tokenizer.by_words else None
        self._whole: tokenizers.Tokenizer | None = None
        if self._bytes is None:
            self._whole = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
            self._whole.encode_special_tokens = False

    def encode(self, documents: Iterable[tuple[Document, Any]], characters: int = 0) -> Iterator[Masked]:
        """Yield every document encoded, in order."""
        if self._whole is not None:
            for document, tag in documents:
                yield self.encode_whole(document, tag)
            return
        for encoded in encode_stream(self.tokenizer, self._parts(documents), characters=characters):
            if done := self._take(encoded):
                yield done

    def refuses(self, documents: Iterable[Document]) -> bool:
        """Whether words spell a control token, under a tokenizer that reads chats as one text and would take them so."""
        return self._whole is not None and any(d.mark in d.text for d in documents)

    # ------------------------------------------------------------------------------------ between control tokens

    def _parts(self, documents: Iterable[tuple[Document, Any]]) -> Iterator[TextPiece]:
        for document, tag in documents:
            building = _Building(tag, 0)
            stretches = []
            self._begin(building, document)
            for text, begin, control in self._cut(document):
                if control is not None:
                    weight = _weight_at(document.spans, begin)
                    building.parts.append(self._constant(np.array([control], np.uint32), weight))
                elif text:
                    spans = [
                        (b - begin, e - begin, w) for b, e, w in document.spans if b < begin + len(text) and e > begin
                    ]
                    stretches.append(_Stretch(building, len(building.parts), text, spans))
                    building.parts.append(None)
            building.missing = len(stretches)
            for stretch in stretches:
                yield TextPiece(stretch.text, True, True, stretch)

    def _begin(self, building: _Building, document: Document) -> None:
        """Put the begin token in front, where the template does not: exactly one."""
        first = self.template.special.get("bos_token")
        if first is not None and not document.text.startswith(first):
            building.parts.append(self._constant(self.tokenizer.before, 0.0))

    def _cut(self, document: Document) -> Iterator[tuple[str, int, int | None]]:
        """Yield (text, where it begins, None) and ("", where, id) for control tokens; words that spell one are cut."""
        at = 0
        pattern = re.compile(f"{self.template.pattern.pattern}|{document.mark}")
        for match in pattern.finditer(document.text):
            yield document.text[at : match.start()], at, None
            if match.group() != document.mark:
                yield "", match.start(), self.template.control[match.group()]
            at = match.end()
        yield document.text[at:], at, None

    def _take(self, encoded: Encoded) -> Masked | None:
        stretch: _Stretch = encoded.tag
        stretch.ids.append(encoded.ids)
        if not encoded.last:
            return None
        document = stretch.document
        ids = stretch.ids[0] if len(stretch.ids) == 1 else np.concatenate(stretch.ids)
        document.parts[stretch.place] = (ids, self._weights(ids, stretch))
        document.missing -= 1
        if document.missing:
            return None
        parts = [part for part in document.parts if part is not None]
        return Masked(np.concatenate([i for i, _ in parts]), np.concatenate([t for _, t in parts]), document.tag)

    def _constant(self, ids: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
        return ids, np.full(ids.size, self.palette.number(weight), np.uint8)

    def _weights(self, ids: np.ndarray, stretch: _Stretch) -> np.ndarray:
        text, spans = stretch.text, stretch.spans
        if not spans:
            return np.zeros(ids.size, np.uint8)
        begin, end, weight = spans[0]
        if begin <= 0 and end >= len(text):
            return np.full(ids.size, self.palette.number(weight), np.uint8)
        assert self._bytes is not None
        ends = np.cumsum(self._bytes[ids])
        if (not text.isascii() and not unicodedata.is_normalized("NFC", text)) or ends[-1] != len(text.encode()):
            found, ranges = self.tokenizer.encode_placed([text])[0]
            if found == ids.tolist():
                return self._by_ranges(ranges, spans)
            raise AssertionError(f"two encodings of one text: {text[:80]!r}")
        trained, plain = np.zeros(ids.size, np.uint8), text.isascii()
        for begin, end, weight in spans:
            begin, end = max(begin, 0), min(end, len(text))
            first, last = (begin, end) if plain else (len(text[:at].encode()) for at in (begin, end))
            # Tokens that end behind the first character and begin before the last.
            after = int(np.searchsorted(ends, first, side="right"))
            trained[after : int(np.searchsorted(ends, last, side="left")) + 1] = self.palette.number(weight)
        return trained

    # ------------------------------------------------------------------------------------------------- as one text

    def encode_whole(self, document: Document, tag: Any) -> Masked:
        """Return the document as the tokenizer itself reads the whole text."""
        if self._whole is None:
            self._whole = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
            self._whole.encode_special_tokens = False
        found = self._whole.encode(document.text, add_special_tokens=False)
        ids = np.array(found.ids, np.uint32)
        trained = self._by_ranges(found.offsets, document.spans)
        before = self.tokenizer.before
        if before.size and ids[:1].tolist() != before.tolist():
            ids, trained = np.concatenate((before, ids)), np.concatenate((np.zeros(before.size, np.uint8), trained))
        return Masked(ids, trained, tag)

    def _by_ranges(self, ranges: list[tuple[int, int]], spans: list[Span]) -> np.ndarray:
        places = np.array(ranges, np.int64).reshape(-1, 2)
        trained = np.zeros(len(places), np.uint8)
        for begin, end, weight in spans:
            trained[(places[:, 1] > begin) & (places[:, 0] < end)] = self.palette.number(weight)
        return trained


def _weight_at(spans: list[Span], place: int) -> float:
    return next((weight for begin, end, weight in spans if begin <= place < end), 0.0)


def fit(masked: Masked, capacity: int, rule: str) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Return (pieces that fit a row and have something trained, trained tokens that are left out).

    A piece's first token is read, never predicted. `rule`: drop, cut or split, for what is longer than a row.
    """
    ids, trained = masked.ids, masked.trained
    if ids.size <= capacity:
        return ([(ids, trained)] if trained[1:].any() else []), 0
    if rule == "split":
        pieces = [(ids[at : at + capacity], trained[at : at + capacity]) for at in range(0, ids.size, capacity)]
    else:
        pieces = [(ids[:capacity], trained[:capacity])] if rule == "cut" else []
    kept = [(i, t) for i, t in pieces if t[1:].any()]
    left = int(np.count_nonzero(trained[1:])) - sum(int(np.count_nonzero(t[1:])) for _, t in kept)
    return kept, left
