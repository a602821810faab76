"""A chat: its history, its settings, one answer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tercet.errors import InputError, nearest
from tercet.inference.batch import Batch
from tercet.inference.generate import stream
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served

DEFAULTS = {"temperature": 0.7, "top_p": 0.95}
KEYS = {field.name: type(field.default) for field in fields(Sampling)}


def suggested_sampling(served: Served, given: dict[str, Any]) -> Sampling:
    """Return what is given, else what came with the model, else the usual."""
    own = {key: served.suggested[key] for key in KEYS if isinstance(served.suggested.get(key), (int, float))}
    return Sampling(**{**DEFAULTS, "seed": None, **own, **given})


class Chat:
    """`messages`: the history as chat templates take it. Without a template the texts themselves are continued."""

    def __init__(self, served: Served, system: str | None, tokens: int, given: dict[str, Any]):
        self.served, self.system, self.tokens = served, system, tokens
        self.sampling = suggested_sampling(served, given)
        self._batch = Batch(served.model, 1, vocabulary=served.vocabulary)
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer as it comes; question and answer go into the history, also when it is broken off."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        room = self._batch.capacity - len(ids)
        if room < 1:
            raise InputError(
                f"the chat has {len(ids)} tokens and the model sees {self._batch.capacity}",
                "/undo or /clear make room.",
            )
        answer: list[str] = []
        try:
            for piece in stream(self.served, self._batch, ids, min(self.tokens, room), self.sampling, ()):
                answer.append(piece)
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def again(self) -> Iterator[str]:
        """Yield another answer to the last question."""
        if not self.messages:
            raise InputError("nothing has been asked yet")
        question = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        yield from self.ask(question)

    def command(self, line: str) -> str:
        """Carry out a / command; return what to say. Raises InputError for one that is unknown or wrong."""
        word, _, rest = line[1:].partition(" ")
        if word == "system":
            self.system, self.messages = rest.strip() or None, []
            return "The chat begins again."
        if word == "clear":
            self.messages = []
            return "The chat begins again."
        if word == "undo":
            self.messages = self.messages[:-2]
            return f"{len(self.messages) // 2} questions are left."
        if word == "save":
            return self._save(rest.strip())
        if word == "set":
            return self._set(rest)
        known = ("system", "clear", "undo", "again", "set", "save", "help", "quit")
        raise InputError(f"/{word} is not a command{nearest(word, known)}", "/help lists them.")

    def _set(self, text: str) -> str:
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in KEYS and key != "tokens":
            raise InputError(
                f"{key!r} is not a setting{nearest(key, [*KEYS, 'tokens'])}", f"Known: {', '.join(KEYS)}, tokens."
            )
        try:
            number = int(value) if key in ("tokens", "seed", "top_k") else float(value)
            if (
                number < 0
                or (key in ("top_p", "min_p") and number > 1)
                or (key in ("tokens", "repetition_penalty") and not number)
            ):
                raise ValueError
        except ValueError:
            raise InputError(f"{key}={value} is no value for {key}") from None
        if key == "tokens":
            self.tokens = int(number)
        else:
            self.sampling = replace(self.sampling, **{key: number})
        return f"{key} is {number}."

    def _save(self, name: str) -> str:
        if not name:
            raise InputError("/save needs a file", "For example: /save chat.json")
        try:
            text = json.dumps({"messages": self._all(self.messages)}, ensure_ascii=False, indent=2) + "\n"
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{name} cannot be written: {error.strerror}") from None
        return f"Written to {name}."

    def _all(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        if self.served.template is not None:
            return self.served.chat_ids(self._all(messages))
        return self.served.prompt_ids("\n".join(m["content"] for m in self._all(messages)))
