"""What a tokenizer cannot write: characters without any token, and tokens that say only "unknown".

Byte-level tokenizers and those with byte fallback lose nothing; a vocabulary of characters may lose most of a text in
another script, and training would go on with the rest.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
import orjson
from tokenizers import pre_tokenizers

from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError

REFUSED = 0.05  # share of characters lost, or of unknown tokens, above which a source is not trained on
_SHOWN = 5


class Losses:
    """Counts per source, while texts pass by."""

    def __init__(self, tokenizer: Tokenizer, sources: int):
        self.tokenizer = tokenizer
        state = _state(tokenizer)
        self.unknown_id = unknown_id(tokenizer, state)
        self.complete = complete(tokenizer, state)
        self._ascii = not any(is_lost(tokenizer, chr(n)) for n in range(128))
        self.known: set[str] = set()
        self.gone: set[str] = set()
        self.characters = [0] * sources
        self.lost: list[Counter[str]] = [Counter() for _ in range(sources)]
        self.tokens = [0] * sources
        self.unknown = [0] * sources

    def text(self, source: int, text: str) -> None:
        self.characters[source] += len(text)
        if self.complete or (self._ascii and text.isascii()):
            return
        different = set(text)
        for character in different - self.known:
            if is_lost(self.tokenizer, character):
                self.gone.add(character)
        self.known |= different
        for character in different & self.gone:
            self.lost[source][character] += text.count(character)

    def ids(self, source: int, ids: np.ndarray) -> None:
        self.tokens[source] += ids.size
        if self.unknown_id is not None and not self.complete:
            self.unknown[source] += int((ids == self.unknown_id).sum())

    def figures(self, source: int) -> dict[str, Any]:
        lost = self.lost[source]
        return {
            "lost_characters": lost.total(),
            "lost": [c for c, _ in lost.most_common(_SHOWN)],
            "unknown_tokens": self.unknown[source],
        }

    def refuse(self, names: list[str], tokenizer: str) -> None:
        """Raise InputError when too much of a source could not be written."""
        for n, name in enumerate(names):
            lost, unknown = self.lost[n].total(), self.unknown[n]
            for what, part, whole in (
                ("characters have no token and would be lost", lost, self.characters[n]),
                ("tokens would be the unknown token", unknown, self.tokens[n]),
            ):
                if part > REFUSED * whole:
                    shown = f" ({' '.join(c for c, _ in self.lost[n].most_common(_SHOWN))} …)" if lost else ""
                    raise InputError(
                        f"{name}: {part} of {whole} {what}{shown}: the tokenizer ({tokenizer}) cannot write this text",
                        "Take a tokenizer that knows every byte or these characters, or data.tokenizer=train.",
                    )


def _state(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all that a tokenizer is, as its tokenizer.json says it: megabytes, so it is read once and given on."""
    return orjson.loads(tokenizer.backend.to_str())


def unknown_id(tokenizer: Tokenizer, state: dict[str, Any] | None = None) -> int | None:
    """Return the id that stands for text outside the vocabulary, or None when there is none."""
    if tokenizer.exact is not None:
        return tokenizer.exact.unknown_id
    model = (_state(tokenizer) if state is None else state)["model"]
    if (at := model.get("unk_id")) is not None:  # Unigram's way
        return tokenizer.backend.token_to_id(model["vocab"][at][0])
    token = model.get("unk_token")
    return None if token is None else tokenizer.backend.token_to_id(token)


def complete(tokenizer: Tokenizer, state: dict[str, Any] | None = None) -> bool:
    """Whether every text can be written: the vocabulary holds all bytes, in one of the two usual spellings."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    state = _state(tokenizer) if state is None else state
    if state["model"].get("byte_fallback") and all(f"<0x{n:02X}>" in vocabulary for n in range(256)):
        return True
    return '"ByteLevel"' in json.dumps([state["pre_tokenizer"], state["normalizer"]]) and all(
        letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet()
    )


def is_lost(tokenizer: Tokenizer, character: str) -> bool:
    """Whether a character vanishes: no id stands for it, not even an unknown one.

    White space, marks and control characters may be left out on purpose (by a normalizer) and do not count.
    """
    if unicodedata.category(character)[0] in "ZCM" or tokenizer.exact is not None:
        return False
    return not tokenizer.backend.encode(character, add_special_tokens=False).ids
