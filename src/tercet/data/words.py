"""Encode each different word once: most of a text consists of words that came before.

A byte-level tokenizer cuts a text into pieces in front of every space that follows something other than
white space, and encodes each piece by itself. So a text can be cut there into units ("The", " quick", "
fox."), units can be looked up, and only new ones need the tokenizer. This is several times faster than
encoding the whole, and the ids are the same: `unit_pattern` says for which tokenizers, and each batch
compares one text with the tokenizer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import tokenizers

from tercet.errors import TercetError

# A unit: white space and what follows up to the next white space, when no other white space precedes that.
# Most tokenizers can be cut in front of a line break as well as of a space; some join it to the mark before
# it.
_UNITS = tuple(re.compile(rf"[{c}]*[^{c}]+(?:(?<=\s)[{c}]+[^{c}]*)*|[{c}]+") for c in (r" \t\n\r", " "))
_LIMIT_UNITS = 400_000
_LONGEST_UNIT = 100  # characters; longer ones hardly come twice
_WORTH_CHARACTERS = 24  # characters a unit, above which looking up gains nothing (scripts without spaces)
_CHECKED_CHARACTERS = 1 << 14
_REST_BATCHES = 8
_TOGETHER = 512  # new units encoded as one text
# Parts of a pattern by which a match depends on what stands before it, or on the end of the text. Looked
# for after escaped characters other than these, and then sets in brackets, have been taken out.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGKzZ]|\^|\$")
_ESCAPED, _SET = re.compile(r"\\[^bBAGKzZ]"), re.compile(r"\[[^\]]*\]")


def unit_pattern(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern of units that a tokenizer encodes separately in every text, or None when there is
    none.

    So it is when nothing that it does looks across a space behind a non-space: byte-pair encoding of
    pieces; no normalisation but NFC, which never composes across a space; pieces cut by patterns that do
    not look back. Whether the patterns cut in front of such spaces is tried on texts that have every kind
    of character beside every other.
    """
    if type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return None
    if any(step["type"] != "NFC" for step in _steps(backend.normalizer)):
        return None
    if backend.pre_tokenizer is None or not all(map(_cuts, _steps(backend.pre_tokenizer))):
        return None
    for token in backend.get_added_tokens_decoder().values():
        if " " in token.content or token.lstrip or token.rstrip or token.single_word:
            return None

    def pieces(text: str) -> list[str]:
        return [p for p, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    def separate(pattern: re.Pattern[str]) -> bool:
        return all(pieces(t) == list(chain.from_iterable(map(pieces, pattern.findall(t)))) for t in _trials())

    return next(filter(separate, _UNITS), None)


def token_bytes(backend: tokenizers.Tokenizer, normalized: bool = False) -> np.ndarray | None:
    """Return how many bytes of text each id stands for (int64), or None when that cannot be told.

    `normalized`: of text as the tokenizer's normalizer leaves it.
    """
    if not is_byte_level(backend) or (_steps(backend.normalizer) and not normalized):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = np.zeros(max(vocabulary.values()) + 1, np.int64)
    table[list(vocabulary.values())] = list(map(len, vocabulary))  # one character a byte
    for index, token in backend.get_added_tokens_decoder().items():
        table[index] = len(token.content.encode())
    return table


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a token's spelling has one character a byte of the text."""
    return any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer))


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, sequences taken apart."""
    if part is None:
        return []

    def flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if state["type"] != "Sequence":
            yield state
        for inner in state.get("pretokenizers", state.get("normalizers", ())):
            yield from flat(inner)

    return list(flat(json.loads(part.__getstate__())))


def _cuts(state: dict[str, Any]) -> bool:
    if state["type"] == "ByteLevel":
        return not state["add_prefix_space"]
    if state["type"] == "Split":
        pattern = state["pattern"]
        if "String" in pattern:
            return True
        return not _LOOKS_BACK.search(_SET.sub("", _ESCAPED.sub("", pattern["Regex"])))
    return state["type"] == "Digits"


def _trials() -> Iterator[str]:
    draw = random.Random(0)
    letters, marks = "aZéß中Ⅷ½5٣'’sTlLreVmd", '.,!?;:/\\()[]{}<>|_-+*=#@&%$^~`"。'
    white, other = " " * 18 + "\n\r\t" * 2 + "\u00a0\u3000\u2028\x1c\x85", "\u0301\u200d\U0001f642\x00"
    characters = letters + marks + white + other
    for length in range(1, 25):
        for _ in range(60):
            yield "".join(draw.choices(characters, k=length))


class Words:
    """The encoder. `encode` takes texts to lists of ids as the tokenizer would, and remembers units.

    With `sizes` (see `token_bytes`) new units are encoded many at a time, which is faster than one by one.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[np.ndarray]],
        pattern: re.Pattern[str],
        sizes: np.ndarray | None = None,
    ):
        self._encode, self._units, self._sizes = encode, pattern.findall, sizes
        self._lock = Lock()  # a batch and a joint may be encoded at the same time
        self._rest = 0  # batches to come that are encoded whole
        self._turn = 0
        self._clear()

    def _clear(self) -> None:
        self._known: dict[str, int] = {}
        self._ids = np.zeros(1 << 16, np.uint32)  # the ids of all known units, one after another
        self._starts = np.zeros(1 << 14, np.int64)  # where each unit begins in them, and where the last one ends
        self._count = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids (uint32) of each text. Raises TercetError when a comparison fails."""
        if not texts:
            return []
        with self._lock:
            if self._rest:
                self._rest -= 1
                return self._encode(texts)
            cut = list(map(self._units, texts))
            size, count = sum(map(len, texts)), sum(map(len, cut))
            if size > _WORTH_CHARACTERS * count:
                self._rest = _REST_BATCHES
                return self._encode(texts)
            found = self._looked_up(cut, size)
        self._compare(texts, found)
        return found

    def _looked_up(self, cut: list[list[str]], size: int) -> list[np.ndarray]:
        if self._count > _LIMIT_UNITS:
            self._clear()
        everything = list(chain.from_iterable(cut))
        new = [u for u in dict.fromkeys(everything) if u not in self._known]
        if self._known and sum(map(len, new)) * 2 > size:
            self._rest = _REST_BATCHES  # few words came before: leave it for a while
        # Long ones last, to be forgotten again; first those that may stand behind one another.
        new.sort(key=lambda u: 2 if len(u) > _LONGEST_UNIT else not u[0].isspace() or u[-1].isspace())
        self._learn(new)
        index = np.fromiter(map(self._known.__getitem__, everything), np.int64, len(everything))
        starts = self._starts[index]
        lengths = self._starts[index + 1] - starts
        after = np.cumsum(lengths)
        inside = np.arange(after[-1] if after.size else 0)
        ids = self._ids[np.repeat(starts - (after - lengths), lengths) + inside]
        while new and len(new[-1]) > _LONGEST_UNIT:
            del self._known[new.pop()]
            self._count -= 1
        borders = np.concatenate(([0], after))[np.cumsum([len(c) for c in cut], dtype=np.int64)]
        return np.split(ids, borders[:-1])

    def _learn(self, new: list[str]) -> None:
        if not new:
            return
        parts = self._encode_groups([new[n : n + _TOGETHER] for n in range(0, len(new), _TOGETHER)])
        first = int(self._starts[self._count])
        starts = first + np.cumsum(np.concatenate([counts for _, counts in parts]))
        self._ids = _grown(self._ids, int(starts[-1]))
        self._ids[first : starts[-1]] = np.concatenate([ids for ids, _ in parts])
        self._starts = _grown(self._starts, self._count + len(new) + 1)
        self._starts[self._count + 1 : self._count + len(new) + 1] = starts
        self._known.update(zip(new, range(self._count, self._count + len(new)), strict=True))
        self._count += len(new)

    def _encode_groups(self, groups: list[list[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, per group, (ids of all its units one after another, how many each has)."""
        texts = ["".join(g) for g in groups]
        together = [self._sizes is not None and self._units(t) == g for t, g in zip(texts, groups, strict=True)]
        encoded = iter(self._encode([t for t, good in zip(texts, together, strict=True) if good]))
        parts = [self._apart(g, next(encoded)) if good else None for g, good in zip(groups, together, strict=True)]
        alone = [u for g, part in zip(groups, parts, strict=True) if part is None for u in g]
        single = iter(self._encode(alone) if alone else [])
        return [part or _joined([next(single) for _ in g]) for g, part in zip(groups, parts, strict=True)]

    def _apart(self, group: list[str], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids of units encoded as one text, and how many each has; None when a token lies across two."""
        assert self._sizes is not None
        ends = np.cumsum([len(u) if u.isascii() else len(u.encode()) for u in group])
        reached = np.cumsum(self._sizes[ids])
        last = np.searchsorted(reached, ends)
        if not reached.size or reached[-1] != ends[-1] or not np.array_equal(reached[last], ends):
            return None
        return ids, np.diff(last, prepend=-1)

    def _compare(self, texts: Sequence[str], found: list[np.ndarray]) -> None:
        """Encode one text of the batch as a whole as well; they take turns."""
        short = [n for n, t in enumerate(texts) if len(t) <= _CHECKED_CHARACTERS]
        if not short:
            return
        n = short[self._turn % len(short)]
        self._turn += 1
        if not np.array_equal(self._encode([texts[n]])[0], found[n]):
            raise TercetError(
                f"the tokenizer reads this text differently in words and as a whole: {texts[n][:200]!r}",
                "This is a fault of Tercet; please report it with the name of the tokenizer.",
            )


def _joined(encoded: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(encoded), np.array([e.size for e in encoded], np.int64)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    if size <= array.size:
        return array
    return np.concatenate((array, np.zeros(max(size - array.size, array.size), array.dtype)))
