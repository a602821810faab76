"""A chat as its template writes it, and which of its characters are trained.

The characters of a turn are found by rendering the chat up to it, with the opening of an answer, and up to and with
it: what the second adds to the first is the turn. So no template needs markers for it. A control token spelled out in
somebody's words stays words: an invisible mark inside it tells it from the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from tercet.data.chat import Chat
from tercet.data.control import LIKE_A_TOKEN, tokens_of
from tercet.data.template import Messages, render, special_tokens
from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError

_MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"  # noncharacters: never part of a text
_COMPARED = 32  # chats at first, and then every so many, whose answers are found in both ways
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.S)


class TemplateRefusal(Exception):
    """A template that will not render a chat."""


@dataclass
class Document:
    """The text of a chat and what of it is trained: (begin, end, weight), in order, apart from one another.

    `mark` stands within control tokens that are somebody's words.
    """

    text: str
    spans: list[tuple[int, int, float]]
    mark: str


@dataclass
class Template:
    """A template with the tokenizer that reads it. Raises InputError when the two do not belong together."""

    name: str
    source: str
    tokenizer: Tokenizer
    train_on: str = "assistant"  # assistant, last or all
    special: dict[str, Any] = field(init=False)
    _seen: int = 0
    _differed: bool = False

    def __post_init__(self) -> None:
        self.special = special_tokens(self.tokenizer)
        self.control = self._control()
        self._check_tokens()
        self.end = self._end()
        self._arguments_as_text, self._content_of_calls = self._way_of_calls()

    def _control(self) -> dict[str, int]:
        """Return the tokens that a template writes as such: the special ones, and others that it uses for turns."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        used = self._raw([{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}])
        used += self._raw([{"role": "user", "content": "U"}], opening=True)
        found = {t.content: i for i, t in added.items() if t.content and (t.special or t.content in used)}
        spell = self.tokenizer.backend.id_to_token
        for i in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if i is not None and (token := spell(i)) is not None:
                found[token] = i
        return {text: i for text, i in found.items() if text not in ("<think>", "</think>")}

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))))

    def _check_tokens(self) -> None:
        """Raise InputError when what looks like a control token of the template is no token."""
        written = " ".join([self.source, *tokens_of(self.name)])
        for token in dict.fromkeys(LIKE_A_TOKEN.findall(written)):
            if token in self._probe and self.tokenizer.backend.token_to_id(token) is None:
                raise InputError(
                    f"the template ({self.name}) writes {token}, which is no token of the tokenizer: it would be read as "
                    "several pieces of text, and the model could hardly learn to stop at it",
                    "Take a template whose tokens the tokenizer has (data.template: plain needs none).",
                )

    @cached_property
    def _probe(self) -> str:
        return self._raw([{"role": "user", "content": "U"}, {"role": "assistant", "content": "\ufdd0A"}])

    def _end(self) -> int:
        """Return the id that ends an answer. Raises InputError for a template that ends none."""
        begin = self._probe.rfind("\ufdd0")
        found = self.pattern.search(self._probe, begin) if begin >= 0 else None
        if found is None:
            raise InputError(
                f"the template ({self.name}) puts no control token behind an answer: the model could never learn to stop",
                f"It renders a question U and an answer A as {self._probe.replace(chr(0xFDD0), '')!r}. "
                "Take another with data.template; with data.tokenizer: train, a .jinja file lists its control tokens in its "
                "first line: {# <turn> </turn> -#}.",
            )
        return self.control[found.group()]

    def _way_of_calls(self) -> tuple[bool, str | None]:
        """Return (whether calls carry their arguments as text, what stands as their content): templates differ."""
        for as_text in (False, True):
            for content in ("", None):
                arguments: Any = '{"a": "\ufdd1"}' if as_text else {"a": "\ufdd1"}
                call = {"type": "function", "function": {"name": "\ufdd0f", "arguments": arguments}}
                asked = {"role": "user", "content": "U"}
                try:
                    text = self._raw([asked, {"role": "assistant", "content": content, "tool_calls": [call]}])
                except InputError:
                    continue
                if "\ufdd0f" in text and ("\ufdd1" in text or "fdd1" in text) and "{'" not in text:
                    return as_text, content
        return False, ""

    def _raw(self, messages: Messages, tools: Sequence[Any] | None = None, opening: bool = False) -> str:
        return render(self.source, messages, self.special, tools, opening)

    # ---------------------------------------------------------------------------------------------- of one chat

    def documents(self, chat: Chat) -> list[Document]:
        """Return what a chat is trained as: one document, and one more for each turn whose reasoning the template
        leaves out once later turns follow. Raises TemplateRefusal when it cannot render it, or hides an answer.
        """
        try:
            return self._documents(chat)
        except InputError as error:
            raise TemplateRefusal(error.message.removeprefix("the chat template refuses these messages: ")) from None

    def _documents(self, chat: Chat) -> list[Document]:
        mark, messages, tools = self._guarded(chat)
        text = self._raw(messages, tools)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        weights = {i: chat.weight * chat.messages[i].get("weight", 1.0) for i in answers}
        if self.train_on == "last":
            weights |= dict.fromkeys(answers[:-1], 0.0)
        spans = self._by_marks(text, messages, answers)
        apart: list[Document] = []
        if spans is None or not self._trusts(spans):
            found, apart = self._by_rendering(text, messages, tools, weights, mark)
            self._compare(spans, found, apart)
            spans = found
        self._require_calls(messages, {i: text[begin:end] for i, (begin, end) in spans.items()})
        trained = [(*spans[i], weight) for i, weight in weights.items() if i in spans]
        if self.train_on == "all":
            trained = _between(trained, len(text), chat.weight)
        trained = [s for s in trained if s[2] > 0]
        return [*([Document(text, trained, mark)] if trained or not apart else []), *apart]

    def _by_rendering(
        self,
        text: str,
        messages: Messages,
        tools: Sequence[Any] | None,
        weights: Mapping[int, float],
        mark: str,
    ) -> tuple[dict[int, tuple[int, int]], list[Document]]:
        """Return (where each answer stands in the text, documents of their own for those that it does not show)."""
        spans, apart = {}, []
        for i, weight in weights.items():
            if weight == 0 and self.train_on != "all":
                continue
            upto = text if i == len(messages) - 1 else self._raw(messages[: i + 1], tools)
            begin, end = self._turn(text, upto, messages, tools, i)
            if end is not None and not _hides(messages[i], text[begin:end], upto):
                spans[i] = (begin, end)
                continue
            begin, end = self._turn(upto, upto, messages, tools, i)
            if end is None or not _shows(messages[i], upto):
                raise TemplateRefusal(f"the template ({self.name}) does not show the answer of turn {i + 1}")
            self._require_calls(messages, {i: upto[begin:end]})
            apart.append(Document(upto, [(begin, end, weight)], mark))
        return spans, apart

    def _require_calls(self, messages: Messages, shown: Mapping[int, str]) -> None:
        """Raise TemplateRefusal for an answer whose calls the template does not write: it would be trained as empty."""
        for i, own in shown.items():
            for call in messages[i].get("tool_calls") or ():
                if call["function"]["name"] not in own:
                    raise TemplateRefusal(
                        f"the template ({self.name}) does not write tool calls: that of turn {i + 1}, to "
                        f"{call['function']['name']}, would be trained as an empty answer; data.template=qwen3 writes them"
                    )

    def _by_marks(self, text: str, messages: Messages, answers: Sequence[int]) -> dict[int, tuple[int, int]] | None:
        """Return where each answer stands, told by what opens and ends one; None where that does not tell.

        One rendering in place of two a turn. `_trusts` has it compared with them, at first and ever again.
        """
        opening, end = self._opening, self._spell(self.end)
        pieces = text.split(opening) if opening else []
        if len(pieces) != len(answers) + 1:
            return None
        spans, at = {}, len(pieces[0])
        for i, piece in zip(answers, pieces[1:], strict=True):
            at += len(opening)
            length = piece.find(end)
            if length < 0 or any(word not in piece[:length] for word in _said(messages[i])):
                return None
            spans[i] = (at, at + length + len(end))
            at += len(piece)
        return spans

    @cached_property
    def _opening(self) -> str:
        """Return what the template writes in front of an answer, "" when that does not begin with a control token."""
        asked = [{"role": "user", "content": "\ufdd0U"}]
        text = self._raw(asked, opening=True)
        found = text[_common(self._raw(asked), text) :]
        return found if self.pattern.match(found) and found in self._probe else ""

    def _trusts(self, spans: dict[int, tuple[int, int]]) -> bool:
        self._seen += 1
        return not self._differed and self._seen > _COMPARED and self._seen % _COMPARED != 0

    def _compare(
        self, spans: dict[int, tuple[int, int]] | None, found: dict[int, tuple[int, int]], apart: Sequence[Document]
    ) -> None:
        if spans is not None and (apart or any(spans[i] != place for i, place in found.items())):
            self._differed = True

    def _turn(
        self, text: str, upto: str, messages: Messages, tools: Sequence[Any] | None, i: int
    ) -> tuple[int, int | None]:
        """Return where turn i's own characters begin and end in a text, its end token included; end None: not found."""
        opened = self._raw(messages[:i], tools, opening=True)
        begin = _common(opened, text)
        # The opening may hold what the template leaves out of past turns; what stands before it may not differ.
        if begin < len(opened) and begin < len((self._raw(messages[:i], tools) if i else "").rstrip()):
            return begin, None
        shared = _common(upto, text)
        if shared < len(upto.rstrip()):  # the template writes this turn otherwise once more turns follow
            found = re.compile(re.escape(self._spell(self.end))).search(text, begin)
            return begin, found.end() if found else None
        controls = list(self.pattern.finditer(text, begin, len(upto)))
        if controls and not text[controls[-1].end() : len(upto)].strip():
            return begin, controls[-1].end()
        return begin, len(upto)

    def _spell(self, i: int) -> str:
        return next(text for text, number in self.control.items() if number == i)

    def _guarded(self, chat: Chat) -> tuple[str, list[dict[str, Any]], list[Any]]:
        """Return (mark, messages, tools) as the template gets them: control tokens in their words marked."""
        mark, messages, tools = _MARKS[0], chat.messages, chat.tools
        whole = chat.to_text()
        if self.pattern.search(whole) or mark in whole:
            mark = next((m for m in _MARKS if m not in whole), _MARKS[0])
            messages, tools = self._marked(messages, mark), self._marked(tools, mark)
        made = [self.as_it_takes({k: v for k, v in message.items() if k != "weight"}) for message in messages]
        return mark, made, tools

    def as_it_takes(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its calls as this template takes them."""
        if "tool_calls" not in message:
            return message
        calls = [_as_text(call) for call in message["tool_calls"]] if self._arguments_as_text else message["tool_calls"]
        return {**message, "content": message["content"] or self._content_of_calls, "tool_calls": calls}

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(lambda m: m.group()[0] + mark + m.group()[1:], value)
        if isinstance(value, list):
            return [self._marked(v, mark) for v in value]
        return {k: self._marked(v, mark) for k, v in value.items()} if isinstance(value, dict) else value


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _said(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return (reasoning, answer) of a turn, without white space around them."""
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    if not reasoning and (found := _THOUGHT.search(content)):
        reasoning, content = found[1], content[found.end() :]
    return reasoning.strip(), content.strip()


def _shows(message: Mapping[str, Any], text: str) -> bool:
    reasoning, answer = _said(message)
    return reasoning in text and answer in text


def _hides(message: Mapping[str, Any], own: str, upto: str) -> bool:
    """Whether a turn's own stretch lacks its answer, or reasoning that the template shows while the turn is the last."""
    reasoning, answer = _said(message)
    if message.get("tool_calls"):  # some templates show the calls alone
        return False
    return answer not in own or (reasoning not in own and reasoning in upto)


def _between(spans: list[tuple[int, int, float]], length: int, weight: float) -> list[tuple[int, int, float]]:
    """Return the spans with everything between them, which has the row's own weight."""
    found, at = [], 0
    for begin, end, own in [*spans, (length, length, 0.0)]:
        found += [(at, begin, weight)] if begin > at else []
        found.append((begin, end, own))
        at = end
    return found
