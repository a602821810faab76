"""The ways out of what does not fit: what is short, and the changes with which a plan really fits.

Each way carries the words that `tercet plan` takes, recipe keys and options. It is named only after the search has
been run with it (tests/unit/test_planner_limits.py applies them again).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tercet.planner.legal import refusals
from tercet.planner.search import LEVELS, SEARCHED, Candidate, Search, offloaded, strategies, with_zero
from tercet.spec.counts import Counts
from tercet.spec.recipe import StrategySection
from tercet.spec.strategy import Strategy, Work
from tercet.units import show_bytes

GIB = 2**30
HOST_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)  # what boards are filled with
CARDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORTEST_TOKENS = 256
YEAR_SECONDS = 365 * 86400
TRIAL_TOKENS = 1e8  # a run of a few steps is a trial of one that teaches a model something
AS_KEY = {  # options of `tercet plan` that a recipe has a key for
    "sequence": "data.sequence_tokens={}",
    "batch": "train.batch_sequences={}",
    "method": "adapter.kind=lora adapter.quantize=nf4",
}


@dataclass(frozen=True)
class Way:
    """A change that makes it fit: recipe keys and options of `tercet plan`, and the strategy that then fits."""

    keys: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    found: Candidate | None = None

    @property
    def words(self) -> str:
        flags = [f"--{k.replace('_', '-')} {_quoted(v)}" for k, v in self.options.items() if v is not None]
        return " ".join([*self.keys, *flags])

    @property
    def says(self) -> str:
        """The words, and what then runs."""
        if self.found is None:
            return self.words
        speed = self.found.tokens_per_second
        rate = ", " + f"{speed:,.0f} tokens/s".replace(",", " ") if speed else ""
        return f"{self.words} ({self.found.strategy.word}{rate})"

    @property
    def for_train(self) -> str:
        """What it says to somebody who trains: recipe keys, or what the machine would need and how that is planned."""
        keys = [*self.keys, *(AS_KEY[k].format(v) for k, v in self.options.items() if k in AS_KEY and v is not None)]
        if not self.needs_machine:
            return replace(self, keys=tuple(keys), options={}).says
        host, cards = self.options.get("host_ram"), self.options.get("gpus")
        needed = " and ".join([*([f"{host} of host RAM"] if host else []), *([str(cards)] if cards else [])])
        return f"on a machine with {needed}: tercet plan … {self.says}"

    @property
    def needs_machine(self) -> bool:
        return any(self.options.get(k) is not None for k in ("host_ram", "gpus"))

    def slow(self, tokens: float) -> bool:
        """Whether a run of so many tokens would take longer than anybody waits; false where the speed is unknown."""
        speed = self.found.tokens_per_second if self.found is not None else None
        return bool(speed) and max(tokens, TRIAL_TOKENS) / speed > YEAR_SECONDS

    def to_json(self, tokens: float = 0.0) -> dict[str, Any]:
        return {
            "keys": list(self.keys),
            "options": self.options,
            "says": self.says,
            "for_train": self.for_train,
            "slow": self.slow(tokens),
        }


def offered(ways: Sequence[Way], tokens: float) -> list[dict[str, Any]]:
    """Return the ways as an answer holds them; behind the others those in which a run of `tokens` takes over a year."""
    return [way.to_json(tokens) for way in sorted(ways, key=lambda way: way.slow(tokens))]


def hint_for_train(ways: Sequence[dict[str, Any]]) -> str | None:
    """Return the ways as `tercet train` offers them: recipe keys first, then other machines; slow ones last."""
    if not ways:
        return None
    order = sorted(ways, key=lambda way: (way["slow"], way["for_train"].startswith("on a machine")))
    said = "; or ".join(way["for_train"] + (" (a run of more than a year)" if way["slow"] else "") for way in order)
    if order[0]["slow"] or order[0]["for_train"].startswith("on a machine"):
        return f"Take a smaller model (tercet list presets). It would fit {said if said.startswith('on') else f'with {said}'}."
    return f"It fits with {said}."


def _quoted(value: Any) -> str:
    return f"'{value}'" if " " in str(value) else str(value)


def shortage(search: Search, candidate: Candidate) -> str:
    """Say what is short, and by how much."""
    card, host = search.overflow(candidate)
    machine = search.machine
    if card and machine.card is not None:
        return (
            f"needs {show_bytes(candidate.need)} per card at micro-batch {candidate.strategy.micro_batch}, "
            f"{show_bytes(machine.card.usable_bytes)} are usable: {show_bytes(card)} short"
        )
    limited = f" (limited by {machine.host_limit})" if machine.host_limit else ""
    return (
        f"needs {show_bytes(candidate.host_need)} of host RAM, {show_bytes(machine.host_bytes or 0)} are "
        f"there{limited}: {show_bytes(host)} short"
    )


def way_for(search: Search, candidate: Candidate) -> Way | None:
    """Return the fewest changes of a strategy by which it fits on this machine, or None."""
    own = candidate.strategy
    for changed in _variants(own):
        if refusals(search.counts.model, changed, search.work, search.machine):
            continue
        if search.fits(search.candidate(changed)):
            return Way(_keys(own, changed))
    return None


def _variants(own: Strategy) -> Iterator[Strategy]:
    """Yield the strategy with changes in what saves memory, fewest and mildest first."""
    zeros = range(own.zero, 4) if own.ranks > 1 or own.engine == "deepspeed" else [own.zero]
    levels = [r for r in LEVELS[LEVELS.index(own.recompute) :] if r in (own.recompute, *SEARCHED)]
    away = [(own.offload_optimizer, own.offload_weights)]
    if own.offload_optimizer == "none":
        away.append(("cpu", own.offload_weights))
    if own.engine == "deepspeed" and "nvme" not in away[0]:
        away += [("nvme", own.offload_weights if own.offload_weights == "none" else "nvme"), ("nvme", "nvme")]
    every = [
        replace(with_zero(own, z) if z != own.zero else own, recompute=r, offload_optimizer=a, offload_weights=w)
        for z, r, (a, w) in product(zeros, levels, dict.fromkeys(away))
    ]
    yield from sorted((s for s in every if s != own), key=lambda s: len(_keys(own, s)))


def _keys(own: Strategy, changed: Strategy) -> tuple[str, ...]:
    """Return the recipe keys of what has changed."""
    named = {
        "zero": "zero",
        "recompute": "recompute",
        "offload_optimizer": "offload.optimizer",
        "offload_weights": "offload.weights",
    }
    found = [f"strategy.{k}={getattr(changed, a)}" for a, k in named.items() if getattr(own, a) != getattr(changed, a)]
    if own.engine != "native" and changed.on_nvme != own.on_nvme:
        found.insert(0, f"strategy.engine={own.engine}")
        found += [f"strategy.zero={changed.zero}"] if changed.zero == own.zero else []
    return tuple(found)


class WaysOut:
    """What would change the answer of a search that has found nothing, on this machine or another."""

    def __init__(self, search: Search, section: StrategySection, ranks: int):
        self.search, self.section, self.ranks = search, section, ranks

    def all(self, adapters: Counts | None = None) -> list[Way]:
        """Return the ways found, mildest first; `adapters`: the same model with a quantised base, where asked for all."""
        tried = (
            self.other_strategy(),
            self.longer_context(),
            self.host_memory(),
            self.lighter_states(),
            self.shorter(),
            self.more_cards(),
            self.adapter(adapters),
        )
        return [way for way in tried if way is not None]

    def fitting(self, section: StrategySection, search: Search | None = None, ranks: int | None = None):
        """Return the fastest candidate that fits among those that take least memory, or None."""
        search, ranks = search or self.search, ranks or self.ranks
        tight = section.model_copy(update={"recompute": "full"}) if section.recompute == "auto" else section
        frozen = search.counts.model.frozen
        every = list(strategies(tight, ranks, search.work, frozen))
        if search.machine.card is not None and not frozen and search.open_for_offload(section):
            every += offloaded(tight, ranks, search.work, deepspeed=True, files=True)
        micros = sorted({s.micro_batch for s in every})
        kept = {micros[round(i * (len(micros) - 1) / 4)] for i in range(5)}
        legal = (s for s in every if s.micro_batch in kept)
        legal = (s for s in legal if not refusals(search.counts.model, s, search.work, search.machine))
        fits = [c for c in map(search.candidate, legal) if search.fits(c)]
        return min(fits, key=Candidate.order, default=None)

    def other_strategy(self) -> Way | None:
        """Return another strategy than those that the recipe leaves open, on the same machine."""
        found = self.fitting(StrategySection())
        if found is None:
            return None
        return Way((f"strategy={found.strategy.word}", f"strategy.micro_batch={found.strategy.micro_batch}"), {}, found)

    def _either(self, search: Search, ranks: int | None = None) -> tuple[tuple[str, ...], Candidate] | None:
        """Return (keys, candidate) under the recipe's own section, else under an open one."""
        if found := self.fitting(self.section, search, ranks):
            return (), found
        if found := self.fitting(StrategySection(), search, ranks):
            keys = (f"strategy={found.strategy.word}", f"strategy.micro_batch={found.strategy.micro_batch}")
            return keys, found
        return None

    def _with(self, **changes: Any) -> Search:
        s = self.search
        return Search(changes.get("counts", s.counts), changes.get("work", s.work), changes.get("machine", s.machine), s.constants)  # fmt: skip

    def host_memory(self) -> Way | None:
        machine = self.search.machine
        if machine.host_bytes is None:
            return None
        sizes = [size for size in HOST_GIB if size * GIB > machine.host_bytes]
        if not sizes or not self._either(self._with(machine=replace(machine, host_bytes=sizes[-1] * GIB))):
            return None
        for size in sizes:
            if found := self._either(self._with(machine=replace(machine, host_bytes=size * GIB))):
                return Way(found[0], {"host_ram": f"{size}GiB"}, found[1])
        return None

    def lighter_states(self) -> Way | None:
        """Return lighter number formats of weights and moments: suggested, never taken unasked."""
        work = self.search.work
        if work.optimizer != "adamw" or self.search.counts.model.frozen:
            return None
        for precision in dict.fromkeys((work.precision, "bf16-pure" if work.precision == "bf16" else work.precision)):
            if found := self._either(self._with(work=replace(work, optimizer="adamw-8bit", precision=precision))):
                more = (f"train.precision={precision}",) if precision != work.precision else ()
                return Way((*found[0], "optim.name=adamw-8bit", *more), {}, found[1])
        return None

    def shorter(self) -> Way | None:
        work, context = self.search.work, self.search.counts.model.context_tokens
        tokens = min(work.sequence_tokens // 2, context) if work.sequence_tokens <= context else context
        while tokens >= SHORTEST_TOKENS:
            if found := self._either(self._with(work=replace(work, sequence_tokens=tokens))):
                return Way(found[0], {"sequence": tokens}, found[1])
            tokens //= 2
        return None

    def longer_context(self) -> Way | None:
        """Return the model with a context as long as the sequences, where that is what stands in the way."""
        model, tokens = self.search.counts.model, self.search.work.sequence_tokens
        if tokens <= model.context_tokens or model.module != "tercet":
            return None
        found = self._either(self._with(counts=Counts(replace(model, context_tokens=tokens))))
        return Way((*found[0], f"model.context_tokens={tokens}"), {}, found[1]) if found else None

    def more_cards(self) -> Way | None:
        """Return the fewest such cards that do, with more host memory too where that alone is not enough."""
        machine = self.search.machine
        if machine.card is None:
            return None
        for host in dict.fromkeys((machine.host_bytes, None)):
            for ranks in (n for n in CARDS if n > machine.ranks):
                work: Work = replace(self.search.work, batch_sequences=max(self.search.work.batch_sequences, ranks))
                here = replace(machine, ranks=ranks, lanes=None, host_bytes=host)
                if not (found := self._either(self._with(machine=here, work=work), ranks)):
                    continue
                options: dict[str, Any] = {"gpus": f"{ranks}x{machine.card.name}"}
                options |= {"links": None} if machine.lanes else {}
                options |= {"batch": ranks} if ranks > self.search.work.batch_sequences else {}
                if host is None and machine.host_bytes is not None:
                    options["host_ram"] = f"{-(-found[1].host_need // (16 * GIB)) * 16}GiB"
                return Way(found[0], options, found[1])
        return None

    def adapter(self, counts: Counts | None) -> Way | None:
        if counts is None:
            return None
        found = self._either(self._with(counts=counts, work=replace(self.search.work, quantize="nf4")))
        return Way(found[0], {"method": "qlora"}, found[1]) if found else None
