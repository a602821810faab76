"""A chat: messages in the form that chat templates take, checked, whatever layout they were written in.

A message has `role` (system, user, assistant, tool) and `content`, and where the row has them `reasoning_content`,
`tool_calls` ([{type, function: {name, arguments}}]), `name`, `tool_call_id` and `weight`, its weight in the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

EMPTY, WRONG_TYPE, MISSING, ROLE = "empty text", "wrong type", "missing text", "unknown role"
NO_ANSWER, PREFERENCE = "no answer", "preference pair"
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
WEIGHTS = ("weight", "loss_weight", "train")
TURN_WEIGHTS = (*WEIGHTS, "loss")  # of a turn; a row's own "loss" is a measurement of somebody's
RATED = ("label", "kto_tag")  # true or false: whether the row's answer is a good one
FILES = ("images", "videos", "audios")  # what a chat is about besides its words


class UnusableRow(Exception):
    """Why a row is no chat that can be trained on; `column` is the file's, where one is to blame."""

    def __init__(self, reason: str, detail: str, column: str | None = None):
        super().__init__(detail)
        self.reason, self.detail, self.column = reason, detail, column


@dataclass
class Chat:
    """`weight` is the whole row's in the loss; a message's own multiplies it."""

    messages: list[dict[str, Any]]
    tools: list[Any] = field(default_factory=list)
    weight: float = 1.0

    def to_text(self) -> str:
        """Return the chat as one line of JSON: chats that are rendered alike give equal texts. Raises UnicodeEncodeError for a lone
        surrogate."""
        tree = {"messages": self.messages, "tools": self.tools, "weight": self.weight}
        try:
            return orjson.dumps(tree).decode()  # arguments and schemas of tools are rendered in the data's order
        except TypeError as error:  # orjson's word for a lone surrogate, and for numbers beyond 64 bits
            json.dumps(tree, ensure_ascii=False).encode()
            raise UnusableRow(WRONG_TYPE, str(error)) from None

    @classmethod
    def from_text(cls, text: str) -> Chat:
        return cls(**orjson.loads(text))


def weight_of(row: Mapping[str, Any], names: Sequence[str] = WEIGHTS) -> float | None:
    """Return a row's or message's weight in the loss, None when it says none. True is 1, false is 0."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        try:
            weight = float(value)
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            raise UnusableRow(WRONG_TYPE, f"{name} is {value!r}; a weight is a number from 0 up", name)
        return weight
    return None


def refuse_what_is_no_plain_chat(row: Mapping[str, Any]) -> None:
    """Raise UnusableRow for a row that rates its answer, or is about pictures or sounds."""
    for name in RATED:
        if isinstance(row.get(name), bool):
            rated = "good" if row[name] else "bad"
            raise UnusableRow(
                PREFERENCE,
                f"{name} is {str(row[name]).lower()}: the answer is a {rated} one of rated answers, and training on "
                f"preferences is not built; map: {{weight: {name}}} trains on the good ones alone",
                name,
            )
    for name in FILES:
        if row.get(name):
            raise UnusableRow(WRONG_TYPE, f"the row has {name}; only texts can be trained on", name)


def role_of(value: Any, number: int, column: str) -> str:
    """Return our name of a role. Raises UnusableRow for one that nobody knows."""
    role = ROLES.get(value.strip().lower()) if isinstance(value, str) else None
    if role is None:
        raise UnusableRow(ROLE, f"turn {number} has the role {value!r} (known: {', '.join(ROLES)})", column)
    return role


def text_of(value: Any, what: str, column: str) -> str:
    """Return a content as text: a text, a list of parts that are texts, or nothing at all."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, what, column) for part in value)
    raise UnusableRow(WRONG_TYPE, f"{what} is {type(value).__name__}, not a text", column)


def _part(part: Any, what: str, column: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        found = part.get("text")
        if isinstance(found, str):
            return found
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UnusableRow(WRONG_TYPE, f"{what} has a part of type {kind!r}; only texts can be trained on", column)


def calls_of(value: Any, what: str, column: str) -> list[dict[str, Any]]:
    """Return tool calls in one form, arguments as objects wherever they are one. Raises UnusableRow."""
    calls = decoded(value)
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(inner, str):
            inner = {"name": inner, "arguments": call.get("arguments", {})}
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise UnusableRow(WRONG_TYPE, f"{what} is no tool call: {{name, arguments}} was expected", column)
        arguments = decoded(inner.get("arguments", inner.get("parameters")))
        if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
            arguments = {}
        if not isinstance(arguments, dict):
            said = f"{str(arguments)[:60]!r}"
            raise UnusableRow(WRONG_TYPE, f"the arguments of {what} are no JSON object: {said}", column)
        made = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
        found.append({**({"id": call["id"]} if isinstance(call.get("id"), str) else {}), **made})
    return found


def decoded(value: Any) -> Any:
    """Return what a text that is JSON holds, once or twice encoded; anything else as it is."""
    for _ in range(2):
        if not isinstance(value, str) or not value.strip().startswith(("{", "[", '"')):
            return value
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def tools_of(value: Any) -> list[Any]:
    """Return the tools of a row, each as {type: function, function: …}."""
    found = decoded(value)
    if not found:
        return []
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise UnusableRow(WRONG_TYPE, "tools is no list of objects", "tools")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]


def checked(chat: Chat, column: str, answer: str | None = None) -> Chat:
    """Return the chat. `column`: where its turns are, `answer`: where the last one is, if elsewhere. Raises UnusableRow when there is nothing to learn in it."""
    answers = 0
    for number, message in enumerate(chat.messages, 1):
        empty = not message["content"].strip() and not message.get("tool_calls")
        if empty and message["role"] == "assistant" and message.get("reasoning_content"):
            empty = False
        if empty and message["role"] in ("user", "assistant"):
            what = "answer" if message["role"] == "assistant" else "question"
            place = answer or column if number == len(chat.messages) else column
            raise UnusableRow(EMPTY, f"turn {number}: the {what} is empty or only white space", place)
        answers += message["role"] == "assistant"
    if not answers:
        raise UnusableRow(NO_ANSWER, f"{len(chat.messages)} turns, none of an assistant: nothing to learn", column)
    return chat
