"""Context parallel, described: each rank holds a stretch of every sequence and gathers keys and values."""

from __future__ import annotations

from tercet.spec.axes.split import chunk


def legal(sequence_tokens: int, size: int) -> list[str]:
    if size <= sequence_tokens:
        return []
    return [f"strategy.context: {size} ranks exceed the sequence's {sequence_tokens} tokens"]


def split(sequence_tokens: int, size: int) -> tuple[int, ...]:
    return chunk(sequence_tokens, size)
