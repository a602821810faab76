"""OpenAI's layout: `{"messages": [{"role": …, "content": …}, …]}`; contents as text or parts, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tercet.data.chat import (
    TURN_WEIGHTS,
    Chat,
    UnusableRow,
    calls_of,
    decoded,
    role_of,
    text_of,
    tools_of,
    weight_of,
)

NEEDED = ("messages",)
COLUMNS = ("messages", "tools", "weight")
ALIASES = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")
_KEPT = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning", "thinking")
# What is read of a turn, in any layout, and what says nothing of its words.
OF_A_TURN = frozenset(
    (
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function_call",
        "id",
        "type",
        *_KEPT,
        *_REASONING,
        *TURN_WEIGHTS,
    )
)


def turns_in(row: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return (column, list of turns) of a row, also when the list is written as JSON in a text."""
    for name in ALIASES:
        value = decoded(row[name]) if row.get(name) else None
        if isinstance(value, list) and value:
            return name, value
    return None


def sniff(row: Mapping[str, Any]) -> bool:
    if "messages" in row:
        found = turns_in(row)
        return found is None or not (isinstance(found[1][0], dict) and "from" in found[1][0])
    found = turns_in(row)
    return found is not None and isinstance(found[1][0], dict) and "role" in found[1][0]


def read(row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    column, turns = turns_in(row) or ("messages", row.get("messages"))
    return Chat(messages_of(turns, column, names), tools_of(row.get("tools") or row.get("functions")), row_weight(row))


def row_weight(row: Mapping[str, Any]) -> float:
    weight = weight_of(row)
    return 1.0 if weight is None else weight


def messages_of(turns: Any, column: str, names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a list of turns. Raises UnusableRow."""
    names = names or {}
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("wrong type", f"{column!r} is no list of turns, or an empty one", column)
    return [_message(turn, number, column, names) for number, turn in enumerate(turns, 1)]


def _message(turn: Any, number: int, column: str, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UnusableRow("wrong type", f"turn {number} is no object", column)
    role = role_of(turn.get(names.get("role", "role")), number, column)
    what = f"the content of turn {number}"
    message: dict[str, Any] = {
        "role": role,
        "content": text_of(turn.get(names.get("content", "content")), what, column),
    }
    for name in _REASONING:
        if turn.get(name):
            message["reasoning_content"] = text_of(turn[name], f"the reasoning of turn {number}", column)
            break
    calls = turn.get("tool_calls") or turn.get("function_call")
    if calls and calls != {"name": None, "arguments": None}:  # what a table with a column of calls has in other turns
        message["tool_calls"] = calls_of(calls, f"a call of turn {number}", column)
    message |= {key: turn[key] for key in _KEPT if isinstance(turn.get(key), str)}
    weight = weight_of(turn, TURN_WEIGHTS)
    return message if weight is None else {**message, "weight": weight}


def unread_of_turns(row: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    """Yield each key of a row's turns that nothing reads, as often as it stands there."""
    _, turns = turns_in(row) or ("", [])
    for turn in turns:
        if isinstance(turn, dict):
            yield from (k for k in turn if k not in OF_A_TURN and k not in names.values() and turn[k] is not None)
