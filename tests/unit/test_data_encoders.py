"""Helper processes give the same documents in the same order as this process alone, and end with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet.data import encoders, tokenize, tokenizer
from tercet.errors import TercetError

TEXTS = [f"{n}: the quick fox {n % 7} jumps over the lazy dog, again and again.\n" * (1 + n % 5) for n in range(400)]


@pytest.fixture(scope="module")
def words():
    return tokenizer.train(iter(TEXTS), 400)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(encoders.os, "cpu_count", lambda: 2)


def documents(words, characters: int) -> list[list[int]]:
    parts = (tokenize.TextPiece(text, True, True) for text in TEXTS)
    return [e.ids.tolist() for e in tokenize.encode_stream(words, parts, characters=characters)]


def children() -> set[int]:
    return {int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_helpers_give_the_same_documents_in_the_same_order(words, two_cores, monkeypatch):
    monkeypatch.setattr(tokenize, "BATCH_PARTS", 7)
    before, sent = children(), []
    work = encoders._Helper.work
    monkeypatch.setattr(encoders._Helper, "work", lambda self, texts: sent.append(len(texts)) or work(self, texts))
    alone = documents(words, 0)
    assert not sent, "a small text starts no helper"
    assert documents(words, encoders.WORTH_CHARACTERS) == alone
    assert sent, "a helper took a part of the work"
    assert children() == before, "no helper is left"


def test_a_helper_that_dies_is_an_error_and_none_is_left(words, two_cores, monkeypatch):
    before = children()

    def die(self, texts):
        self._process.kill()
        return work(self, texts)

    work = encoders._Helper.work
    monkeypatch.setattr(encoders._Helper, "work", die)
    monkeypatch.setattr(tokenize, "BATCH_PARTS", 7)
    with pytest.raises(TercetError, match="ended with code -9"):
        documents(words, encoders.WORTH_CHARACTERS)
    assert children() == before


def test_helpers_make_the_same_of_chats(two_cores, tmp_path, monkeypatch):
    """Rows with many loss weights: the numbers that a helper gave them are not this process's."""
    from tests.chats_tiny import prepared, turns

    from tercet.data import encoding

    monkeypatch.setattr(encoding, "CHAT_CHARACTERS", 400)
    rows = [
        {
            "messages": turns(f"question {n}?", f"antwort é {n}.", "and?", "<|im_end|> is a word"),
            "weight": (n * 7 % 11) / 4,
        }
        for n in range(1, 60)
    ]

    def contents(made):
        found = []
        for source in made.train.sources:
            for n in range(len(source)):
                trained = source.trained(n)
                found.append((source.row(n)[0].tolist(), trained.tolist()))
        return found

    sent = []
    work = encoders._Helper.work
    monkeypatch.setattr(encoders._Helper, "work", lambda self, texts: sent.append(len(texts)) or work(self, texts))
    alone = prepared(tmp_path / "one", rows)
    assert not sent
    monkeypatch.setattr(encoders, "WORTH_CHARACTERS", 1000)
    shared = prepared(tmp_path / "two", rows)
    assert sent, "a helper took a part of the work"
    assert contents(shared) == contents(alone)
    assert shared.report["chats"] == alone.report["chats"]
