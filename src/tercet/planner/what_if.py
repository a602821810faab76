"""What another machine or length would bring: the best plan for each value of one thing, all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tercet.errors import InputError, nearest
from tercet.planner.ranges import spread, within
from tercet.planner.search import Candidate, Search
from tercet.planner.ways import CARDS, GIB, HOST_GIB, shortage
from tercet.spec.machine import Machine
from tercet.spec.recipe import StrategySection
from tercet.spec.strategy import Work

LANES = (4, 8, 16)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
VALUES = 7  # rows of a table

Changed = tuple[Any, str, Machine, Work]  # value, as it is shown, and what changes


def parse_what_if(text: str) -> list[str]:
    """Read "host_ram,cards". Raises InputError."""
    names = [part.strip().replace("-", "_") for part in text.split(",") if part.strip()]
    for name in names or [""]:
        if name not in KINDS:
            raise InputError(
                f"--what-if {name!r} is none of {', '.join(KINDS)}{nearest(name, KINDS)}",
                "Several are separated by commas: --what-if host_ram,cards",
            )
    return list(dict.fromkeys(names))


def what_if(search: Search, section: StrategySection, ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """Return {"of", "rows"} per name; a row is the best plan of one value, or what is short."""
    found = []
    for name in names:
        values, why = list(KINDS[name](search, ranks)), None
        if not values:
            why = f"{name} does not change this plan: " + NOTHING[name]
        rows = [_row(search, section, value) for value in values]
        found.append({"of": name, "rows": rows, "why": why})
    return found


def _row(search: Search, section: StrategySection, changed: Changed) -> dict[str, Any]:
    value, says, machine, work = changed
    here = Search(search.counts, work, machine, search.constants)
    fits, refused = (found := here.run(section, machine.ranks, deepspeed=True, files=True)).fits, found.refused
    row: dict[str, Any] = {
        "value": value,
        "says": says,
        "here": machine == search.machine and work == search.work,
        "strategy": None,
        "micro_batch": None,
        "card_bytes": None,
        "host_bytes": None,
        "tokens_per_second": None,
        "range": None,
        "why": None,
    }
    if not fits:
        tried = next((r for r in refused if r.tried is not None), None)
        row["why"] = shortage(here, tried.tried) if tried and tried.tried else next(iter(refused[0].why), None)
        return row
    return {**row, **_figures(fits[0], machine)}


def _figures(best: Candidate, machine: Machine) -> dict[str, Any]:
    half, speed = spread(best.job, machine), best.tokens_per_second
    return {
        "strategy": best.strategy.word,
        "micro_batch": best.strategy.micro_batch,
        "card_bytes": best.need,
        "host_bytes": best.host_need,
        "tokens_per_second": speed,
        "range": within(speed, half.speed) if speed and half else None,
    }


def _around(values: tuple[int, ...], here: int) -> list[int]:
    """Return at most VALUES of them, with what is here among them and as many below as above."""
    every = sorted({*values, here})
    first = max(0, min(every.index(here) - VALUES // 2, len(every) - VALUES))
    return every[first : first + VALUES]


def _host_ram(search: Search, ranks: int) -> Iterator[Changed]:
    machine = search.machine
    sizes = _around(tuple(n * GIB for n in HOST_GIB), machine.host_bytes or 128 * GIB)
    for size in sizes if machine.card is not None else ():
        yield size, f"{size / GIB:.0f} GiB", replace(machine, host_bytes=size), search.work


def _cards(search: Search, ranks: int) -> Iterator[Changed]:
    machine = search.machine
    if machine.card is None:
        return
    for count in _around((1, *CARDS), machine.ranks):
        work = replace(search.work, batch_sequences=max(search.work.batch_sequences, count))
        more = replace(machine, ranks=count, lanes=None, cards=())
        yield count, f"{count}", machine.widest(count) if count < machine.ranks else machine if count == machine.ranks else more, work  # fmt: skip


def _links(search: Search, ranks: int) -> Iterator[Changed]:
    machine = search.machine
    if machine.card is None or "host_to_card" in machine.measured:
        return
    own = machine.lanes
    if own is not None and len(set(own)) > 1:
        yield own, ",".join(f"x{n}" for n in own), machine, search.work
    for lanes in (n for n in LANES if n <= (machine.card.pcie_lanes or 16)):
        every = (lanes,) * machine.ranks
        same = own == every or (own is None and lanes == machine.card.pcie_lanes)
        yield lanes, f"x{lanes}", machine if same else replace(machine, lanes=every), search.work


def _sequence(search: Search, ranks: int) -> Iterator[Changed]:
    """Lengths within the model's context, with as many tokens per step as now."""
    work, context = search.work, search.counts.model.context_tokens
    tokens = work.sequence_tokens * work.batch_sequences
    for length in _around(tuple(n for n in LENGTHS if n <= context), min(work.sequence_tokens, context)):
        batch = work.batch_sequences if length == work.sequence_tokens else max(ranks, tokens // length)
        yield length, f"{length} tokens", search.machine, replace(work, sequence_tokens=length, batch_sequences=batch)


KINDS: dict[str, Callable[[Search, int], Iterator[Changed]]] = {
    "host_ram": _host_ram,
    "cards": _cards,
    "links": _links,
    "sequence": _sequence,
}
NOTHING = {
    "host_ram": "ranks on a CPU share what there is",
    "cards": "there are none (--gpus 3x4090)",
    "links": "there are no cards, or tercet doctor has measured their copies",
    "sequence": "the model has no other length",
}
