"""Small texts, recipes' data sections and prepared data for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tercet.data.prepare import Prepared, prepare
from tercet.spec.recipe import DataSection

SYLLABLES = (
    "ri",
    "ver",
    "sto",
    "ne",
    "let",
    "ter",
    "un",
    "der",
    "wal",
    "ks",
    "se",
    "ven",
    "gre",
    "en",
    "win",
    "dow",
    "and",
    "the",
    "of",
    "mor",
    "ning",
    "qu",
    "ick",
    "ly",
)


def sentence(seed: int, words: int = 12) -> str:
    """A text that no other seed gives."""
    draw = random.Random(seed)
    made = ("".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(words))
    return f"Text {seed}: " + " ".join(made) + "."


def write_rows(path: Path, texts: Iterable[str], **columns: Any) -> Path:
    lines = [json.dumps({"text": t, **columns}, ensure_ascii=False) for t in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def section(folder: Path, train: Any, **keys: Any) -> DataSection:
    defaults = {
        "sequence_tokens": 32,
        "tokenizer": "train",
        "long_rows": "split",
        "cache": str(folder / "cache"),
    }
    return DataSection.model_validate({"train": train if isinstance(train, list) else str(train), **defaults, **keys})


def made(folder: Path, train: Any, *, vocabulary: int = 300, seed: int = 0, say: Any = print, **keys: Any) -> Prepared:
    """Prepare with a tokenizer trained on the text unless `tokenizer` says otherwise."""
    return prepare(section(folder, train, **keys), vocabulary=vocabulary, model_tokenizer=None, seed=seed, say=say)


def documents(prepared: Prepared) -> list[list[int]]:
    """The ids of every training document, in no order that means anything."""
    found = []
    for rows in prepared.train.sources:
        for n in range(len(rows)):
            ids, lengths = rows.row(n)
            at = 0
            for length in lengths:
                found.append(ids[at : at + length].tolist())
                at += length
    return sorted(found)
