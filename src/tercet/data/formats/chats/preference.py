"""Preference pairs: `chosen` and `rejected`, answers or whole chats, under a prompt. Read and checked, not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.data.chat import PREFERENCE, Chat, UnusableRow, checked, decoded, text_of
from tercet.data.formats.chats.messages import messages_of

NEEDED = ("chosen", "rejected")
COLUMNS = ("chosen", "rejected", "prompt")


def sniff(row: Mapping[str, Any]) -> bool:
    return "chosen" in row and "rejected" in row


def read(row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    """Raise UnusableRow in any case: it says whether the pair is sound, and what would train on its chosen side."""
    chosen, rejected = (_side(row, name, names) for name in NEEDED)
    if chosen == rejected:
        raise UnusableRow("bad preference pair", "chosen and rejected are the same", "rejected")
    cure = "map: {completion: chosen}" if isinstance(row["chosen"], str) else "map: {messages: chosen}"
    detail = f"a sound pair, but training on preferences is not built; {cure} trains on the chosen side alone"
    raise UnusableRow(PREFERENCE, detail, "chosen")


def _side(row: Mapping[str, Any], name: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    value = decoded(row[name])
    if isinstance(value, str):
        found = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict):  # one turn
        turn = {"role": value.get("role", value.get("from")), "content": value.get("content", value.get("value"))}
        found = messages_of([turn], name, names)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]:
        found = messages_of([{"role": t.get("from"), "content": t.get("value")} for t in value], name)
    else:
        found = messages_of(value, name, names)
    if isinstance(row.get("prompt"), str):
        text_of(row["prompt"], "prompt", "prompt")
    return checked(Chat(found), name).messages
