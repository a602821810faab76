"""A prompt and its completion, texts or lists of turns: `{"prompt": …, "completion": …}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.data.chat import Chat, decoded, text_of, tools_of
from tercet.data.formats.chats.messages import messages_of, row_weight

NEEDED = ("prompt", "completion")
COLUMNS = ("prompt", "completion", "system", "tools", "weight")
_ANSWERS = ("completion", "response")


def sniff(row: Mapping[str, Any]) -> bool:
    return "prompt" in row and any(name in row for name in _ANSWERS)


def read(row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    answer = next(name for name in _ANSWERS if name in row)
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row["system"], "system", "system")})
    for name, role in (("prompt", "user"), (answer, "assistant")):
        value = decoded(row[name]) if isinstance(row[name], str) and row[name].lstrip().startswith("[{") else row[name]
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
            messages += messages_of(value, name, names)
        else:
            messages.append({"role": role, "content": text_of(row[name], name, name)})
    return Chat(messages, tools_of(row.get("tools")), row_weight(row))
