"""What the cards' sensors told during a run: lost cards and warnings, and the extremes of each card."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tercet.report.compare import number


def card_warnings(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return what was wrong with the cards: lost ones first, each kind of warning once."""
    events = list(events)
    lost = [str(e["says"]) for e in events if e["event"] == "cards_lost" and e.get("says")]
    warned: dict[str, str] = {}
    for event in events:
        for text in event.get("warnings") or [] if event["event"] == "cards" else []:
            warned.setdefault(str(text).rpartition(" is at ")[0] or str(text), str(text))
    return [*lost, *warned.values()]


def card_facts(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return one phrase per card: the most heat and power that was seen, and how often it was slowed down."""
    looks: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        for card in event.get("cards") or [] if event["event"] == "cards" else []:
            if isinstance(card, dict):
                looks.setdefault(str(card.get("card")), []).append(card)
    return [_phrase(index, seen) for index, seen in sorted(looks.items())]


def _phrase(index: str, seen: list[dict[str, Any]]) -> str:
    def most(key: str) -> float | None:
        return max((v for card in seen if (v := number(card.get(key))) is not None), default=None)

    heat, power = most("celsius"), most("watts")
    slowed = sum(bool(card.get("slowed_by")) for card in seen)
    words = [f"up to {heat:.0f} °C" if heat is not None else "", f"{power:.0f} W" if power is not None else ""]
    words.append(f"slowed down in {slowed} of {len(seen)} looks" if slowed else "")
    return f"{index}: " + " ".join(w for w in words if w)
