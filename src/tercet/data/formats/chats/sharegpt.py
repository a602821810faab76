"""ShareGPT's layout: `{"conversations": [{"from": "human", "value": …}, …], "system": …, "tools": …}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.data.chat import TURN_WEIGHTS, Chat, UnusableRow, calls_of, role_of, text_of, tools_of, weight_of
from tercet.data.formats.chats.messages import row_weight, turns_in

NEEDED = ("conversations",)
COLUMNS = ("conversations", "system", "tools", "weight")
_CALLS = ("function_call", "tool_call", "function-call")


def sniff(row: Mapping[str, Any]) -> bool:
    found = turns_in(row)
    return found is not None and isinstance(found[1][0], dict) and "from" in found[1][0]


def read(row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    column, turns = turns_in(row) or ("conversations", None)
    if not isinstance(turns, list):
        raise UnusableRow("wrong type", "'conversations' is no list of turns, or an empty one", column)
    messages = [_message(turn, number, column, names) for number, turn in enumerate(turns, 1)]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": text_of(row["system"], "system", "system")})
    return Chat(messages, tools_of(row.get("tools")), row_weight(row))


def _message(turn: Any, number: int, column: str, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UnusableRow("wrong type", f"turn {number} is no object", column)
    speaker = turn.get(names.get("role", "from"))
    text = text_of(turn.get(names.get("content", "value")), f"the value of turn {number}", column)
    if speaker in _CALLS:
        made = {"role": "assistant", "content": "", "tool_calls": calls_of(text, f"turn {number}", column)}
    else:
        made = {"role": role_of(speaker, number, column), "content": text}
    weight = weight_of(turn, TURN_WEIGHTS)
    return made if weight is None else {**made, "weight": weight}
