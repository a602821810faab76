"""Chats as text to documents as they are trained: the part of preparing that any process can do, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tercet.data.chat import Chat
from tercet.data.masks import Masked, Masker
from tercet.data.shards import Palette
from tercet.data.spans import Document, Template, TemplateRefusal
from tercet.data.tokenizer import Tokenizer


@dataclass
class Worked:
    """What became of one chat: its documents as (ids, numbers of weights), or why it has none.

    `weights` are those that the numbers mean; `counts` what is worth telling.
    """

    documents: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    weights: tuple[float, ...] = ()
    refused: str | None = None
    spelled: bool = False  # words spell a control token that this tokenizer would take for one
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class ChatJob:
    """The job of encoders.Encoders for chats: a Worked for each text (chat.Chat.to_text)."""

    tokenizer: Tokenizer
    name: str
    source: str
    train_on: str

    def begin(self) -> Callable[[Sequence[str]], list[Worked]]:
        palette = Palette()
        masker = Masker(self.tokenizer, Template(self.name, self.source, self.tokenizer, self.train_on), palette)

        def work(texts: Sequence[str]) -> list[Worked]:
            found = [Worked() for _ in texts]
            for masked in masker.encode(_documents(masker, texts, found)):
                masked.tag.documents.append((masked.ids, masked.trained))
            for one in found:
                one.weights = palette.weights
            return found

        return work


def _documents(masker: Masker, texts: Sequence[str], found: Sequence[Worked]) -> Iterator[tuple[Document, Worked]]:
    for text, worked in zip(texts, found, strict=True):
        chat = Chat.from_text(text)
        try:
            documents = masker.template.documents(chat)
        except TemplateRefusal as error:
            worked.refused = str(error)
            continue
        if masker.refuses(documents):
            worked.spelled = True
            continue
        worked.counts["further documents"] += len(documents) - 1
        worked.counts["turns trained"] += sum(len(d.spans) for d in documents)
        _notice(chat, documents[0], worked.counts)
        for document in documents:
            yield document, worked


def _notice(chat: Chat, document: Document, counts: Counter[str]) -> None:
    """Count what a template leaves out, and words that spell control tokens."""
    if document.mark in document.text:
        counts["rows whose words spell a control token"] += 1
        return
    for message in chat.messages:
        if message["role"] != "assistant" and message["content"].strip() not in document.text:
            counts[f"{message['role']} turns that the template leaves out or changes"] += 1


def renumbered(worked: Worked, palette: Palette) -> list[Masked]:
    """Return the documents with the numbers that their weights have in `palette`."""
    table = np.array([palette.number(weight) for weight in worked.weights], np.uint8)
    same = np.array_equal(table, np.arange(table.size, dtype=np.uint8))
    return [Masked(ids, trained if same else table[trained], None) for ids, trained in worked.documents]
