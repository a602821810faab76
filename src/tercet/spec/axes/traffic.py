"""What travels between ranks, as plans count it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """`count` calls per optimizer step that together carry `payload` bytes: gathered, or before their reduction."""

    kind: str
    count: int
    payload: int
