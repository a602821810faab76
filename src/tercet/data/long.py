"""What each rule for long rows would leave out of the training rows that are longer than a sequence, side by side."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tercet.data.masks import Masked, fit

RULES = ("drop", "cut", "split")


class LongRows:
    """Counts rows that are too long, and per rule the rows and trained tokens that it leaves out."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rows = 0
        self.dropped: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def text(self, length: int) -> None:
        """Note a document of `length` tokens of which all but the first of a piece are trained."""
        if length <= self.capacity:
            return
        self.rows += 1
        self.dropped["drop"] += 1
        self.tokens["drop"] += length - 1
        self.tokens["cut"] += length - self.capacity
        self.tokens["split"] += -(-length // self.capacity) - 1

    def chat(self, documents: list[Masked]) -> None:
        """Note a row that is a chat of one or more documents."""
        if all(d.ids.size <= self.capacity for d in documents):
            return
        self.rows += 1
        for rule in RULES:
            found = [fit(d, self.capacity, rule) for d in documents]
            self.dropped[rule] += not any(pieces for pieces, _ in found)
            self.tokens[rule] += sum(left for _, left in found)

    def figures(self, rule: str) -> dict[str, Any]:
        """`rule`: the one that was used."""
        each = {r: {"rows_dropped": self.dropped[r], "trained_tokens_left_out": self.tokens[r]} for r in RULES}
        return {"rows": self.rows, "rule": rule, **each}


def lines(figures: dict[str, Any] | None, capacity: int) -> list[str]:
    if not figures or not figures["rows"]:
        return []
    out = [
        f"long rows   {figures['rows']} of those to train are longer than {capacity} tokens; left out of training by"
    ]
    for rule in RULES:
        each, used = figures[rule], "   <- data.long_rows" if rule == figures["rule"] else ""
        out.append(
            f"            {rule:<6}{each['rows_dropped']:>8} rows whole, {each['trained_tokens_left_out']:>10} trained tokens{used}"
        )
    return out


def said(figures: dict[str, Any] | None, trained: int, capacity: int) -> str | None:
    """Return what a run is told of long rows, None where nothing is left out. `trained`: tokens that are trained."""
    if not figures:
        return None
    rule = figures["rule"]
    left = figures[rule]["trained_tokens_left_out"]
    if not left or rule == "split":
        return None
    what = "are left out" if rule == "drop" else "are cut"
    others = {"drop": "data.long_rows=split trains them in pieces", "cut": "data.long_rows=split trains the rest too"}
    return (
        f"long rows: {figures['rows']} rows of more than {capacity} tokens {what}, with {100 * left / (left + trained):.2g} % "
        f"of what would be trained ({left} of {left + trained} tokens); {others[rule]}, a larger data.sequence_tokens whole"
    )
