"""Alpaca's layout: `instruction`, `input` and `output`, with `system` and `history` ([[question, answer], …])."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.data.chat import Chat, UnusableRow, decoded, text_of
from tercet.data.formats.chats.messages import row_weight

NEEDED = ("instruction", "output")
COLUMNS = ("instruction", "output", "input", "system", "history", "weight")


def sniff(row: Mapping[str, Any]) -> bool:
    return "instruction" in row and "output" in row


def read(row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row["system"], "system", "system")})
    for number, pair in enumerate(decoded(row.get("history")) or (), 1):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise UnusableRow("wrong type", f"history {number} is no pair of question and answer", "history")
        for role, said in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text_of(said, f"history {number}", "history")})
    asked = [text_of(row.get(name), name, name) for name in ("instruction", "input")]
    messages.append({"role": "user", "content": "\n".join(part for part in asked if part.strip())})
    messages.append({"role": "assistant", "content": text_of(row["output"], "output", "output")})
    return Chat(messages, weight=row_weight(row))
