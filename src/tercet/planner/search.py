"""Every legal strategy for a machine, ranked by predicted speed; each refusal with its reason and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Any

from tercet.planner.clock import clock, collectives, step_seconds
from tercet.planner.constants import Constants
from tercet.planner.job import Job, of_strategy
from tercet.planner.ledger import host_rows, moments, phases
from tercet.planner.legal import refusals
from tercet.spec.counts import Counts
from tercet.spec.machine import Machine
from tercet.spec.recipe import StrategySection
from tercet.spec.strategy import Recompute, Strategy, Work
from tercet.units import show_bytes

LARGEST_MICRO_TOKENS = 65_536  # beyond this a matmul gains nothing, and only memory grows
LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")
UNMEASURED_MICRO_TOKENS = 8192  # where no speed is known, about where CPUs stop gaining


@dataclass(frozen=True)
class Candidate:
    """A strategy with its predictions. `seconds` None: the processor's speed is unknown."""

    strategy: Strategy
    job: Job
    need: int  # bytes per rank in the worst phase
    host_need: int
    rows: dict[str, float] | None
    sent: float  # bytes through one rank's link per step

    @property
    def seconds(self) -> float | None:
        return step_seconds(self.rows) if self.rows else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.job.step_tokens / self.seconds if self.seconds else None

    @property
    def group(self) -> tuple[Any, ...]:
        """What makes two candidates one line of the table: all but micro-batch."""
        s = self.strategy
        offload = (s.offload_optimizer, s.offload_weights)
        return s.engine, s.zero, s.recompute, s.reduce_gradients, s.compile, offload

    def order(self) -> tuple[Any, ...]:
        """Sort key, best first. Without known speeds: least recomputing, then least sent, then simplest."""
        recompute = LEVELS.index(self.strategy.recompute)
        if self.seconds is not None:
            # Differences below half a percent mean nothing; then the simpler and the smaller wins.
            return (
                round(200 * _log(self.seconds / max(self.job.step_tokens, 1e-9))),
                self.strategy.zero,
                recompute,
                self.need,
            )
        far = self.strategy.micro_batch * self.job.sequence > UNMEASURED_MICRO_TOKENS
        return (recompute, self.sent, self.strategy.zero, far, -self.strategy.micro_batch)


def _log(value: float) -> float:
    from math import log

    return log(value)


@dataclass(frozen=True)
class Refusal:
    strategy: Strategy
    why: list[str]


@dataclass(frozen=True)
class Found:
    fits: list[Candidate]  # best first, one per group
    refused: list[Refusal]


class Search:
    """Predicts strategies of one model, work and machine."""

    def __init__(self, counts: Counts, work: Work, machine: Machine, constants: Constants):
        self.counts, self.work, self.machine, self.constants = counts, work, machine, constants

    def candidate(self, strategy: Strategy, work: Work | None = None) -> Candidate:
        job = of_strategy(strategy, work or self.work, self.counts.model.module, self.counts.model.frozen)
        machine = self.machine.with_ranks(strategy.ranks) if strategy.ranks != self.machine.ranks else self.machine
        on_gpu = machine.card is not None
        need = max(phases(self.counts, job, self.constants, on_gpu=on_gpu).values())
        host = sum(host_rows(self.counts, job, not on_gpu).values())
        if not on_gpu:
            host += need * strategy.ranks
        n = job.shards
        sent = sum(
            x.payload * (n - 1) / n * (2 if x.kind == "all_reduce" else 1) for x in collectives(self.counts, job)
        )
        return Candidate(strategy, job, need, host, clock(self.counts, job, machine, self.constants), sent)

    def overflow(self, candidate: Candidate) -> tuple[int, int]:
        """Return the bytes that are missing on the card and on the host; (0, 0) when it fits."""
        card = host = 0
        if self.machine.card is not None:
            card = max(0, candidate.need - self.machine.card.usable_bytes)
        if self.machine.host_bytes is not None:
            host = max(0, candidate.host_need - self.machine.host_bytes)
        return card, host

    def fits(self, candidate: Candidate) -> bool:
        return self.overflow(candidate) == (0, 0)

    def run(self, section: StrategySection, ranks: int, deepspeed: bool = False) -> Found:
        """Return all groups of strategies that the section leaves open on `ranks` workers.

        Offload to the host is tried too where the machine has cards and the section leaves it open; with DeepSpeed's
        engine if `deepspeed`.
        """
        best: dict[tuple[Any, ...], Candidate] = {}
        too_large: dict[tuple[Any, ...], Candidate] = {}
        illegal: dict[str, Refusal] = {}
        every = strategies(section, ranks, self.work, self.counts.model.frozen)
        frozen = self.counts.model.frozen  # adapters have no states worth moving
        if self.machine.card is not None and not frozen and not OPEN_FOR_OFFLOAD & section.model_fields_set:
            every = chain(every, offloaded(section, ranks, self.work, deepspeed))
        for strategy in every:
            why = refusals(self.counts.model, strategy, self.work, self.machine)
            if why:
                illegal.setdefault("\n".join(why), Refusal(strategy, why))
                continue
            found = self.candidate(strategy)
            chosen = best if self.fits(found) else too_large
            known = chosen.get(found.group)
            better = known is None or (found.order() < known.order() if chosen is best else found.need < known.need)
            if better:
                chosen[found.group] = found
        fits = _distinct(sorted(best.values(), key=Candidate.order))
        refused = [r for r in illegal.values() if not fits or r.strategy.micro_batch == 1]
        refused += [
            Refusal(c.strategy, [self.explain(c)])
            for group, c in sorted(too_large.items(), key=lambda item: item[1].need)
            if group not in best
        ]
        return Found(fits, refused)

    # --------------------------------------------------------------------------------------- the way out

    def explain(self, candidate: Candidate) -> str:
        """Say by how much a strategy does not fit, and the smallest change that would make it fit."""
        card, host = self.overflow(candidate)
        where = "card" if self.machine.card is not None else "process"
        if card:
            usable = self.machine.card.usable_bytes  # type: ignore[union-attr]
            words = (
                f"needs {show_bytes(candidate.need)} per {where} at micro-batch {candidate.strategy.micro_batch}, "
                f"{show_bytes(usable)} are usable: {show_bytes(card)} too much"
            )
        else:
            limited = f" (limited by {self.machine.host_limit})" if self.machine.host_limit else ""
            words = (
                f"needs {show_bytes(candidate.host_need)} of host RAM, {show_bytes(self.machine.host_bytes or 0)} are "
                f"there{limited}: {show_bytes(host)} more needed"
            )
        return f"{words}; {self.way_out(candidate)}"

    def way_out(self, candidate: Candidate) -> str:
        """Return the smallest change by which it fits: of the card's memory, or of the host's where only that is short."""
        strategy = candidate.strategy
        card, host = self.overflow(candidate)
        if host and not card:
            files = self._in_files(strategy) if strategy.engine == "deepspeed" else None
            return files or f"add {show_bytes(host)} of host RAM or take a smaller model"
        for recompute in LEVELS[LEVELS.index(strategy.recompute) + 1 :]:
            other = self.candidate(replace(strategy, recompute=recompute))
            if self.fits(other):
                return f"recompute: {recompute} saves {show_bytes(candidate.need - other.need)} and fits"
        for zero in range(strategy.zero + 1, 4) if strategy.ranks > 1 else ():
            other = self.candidate(_with_zero(strategy, zero))
            if self.fits(other):
                return f"zero: {zero} saves {show_bytes(candidate.need - other.need)} and fits"
        if strategy.engine == "deepspeed" and host:
            files = self._in_files(strategy)
            if files is not None:
                return files
        tokens = self.work.sequence_tokens // 2
        while tokens >= 256:
            if self.fits(self.candidate(strategy, replace(self.work, sequence_tokens=tokens))):
                return f"{tokens} instead of {self.work.sequence_tokens} tokens per sequence fits"
            tokens //= 2
        return self._more_hardware(strategy)

    def _in_files(self, strategy: Strategy) -> str | None:
        """Say whether files on NVMe instead of host memory would let it fit, and how fast it then is."""
        for weights in ("none", "nvme"):
            if strategy.offload_weights != "none" and weights == "none":
                continue
            base = replace(_with_zero(strategy, 3), recompute="full", offload_optimizer="nvme", offload_weights=weights)
            tried = [
                self.candidate(replace(base, micro_batch=n)) for n in micro_batches(strategy.mesh.data_ranks, self.work)
            ]
            fitting = [c for c in tried if self.fits(c)]
            if fitting:
                other = min(fitting, key=Candidate.order)
                keys = "strategy.engine=deepspeed strategy.zero=3 strategy.offload.optimizer=nvme"
                keys += " strategy.offload.weights=nvme" if weights == "nvme" else ""
                speed = f", {other.tokens_per_second:.0f} tokens/s" if other.tokens_per_second else ""
                return f"{keys} keeps it in files and fits ({show_bytes(other.host_need)} of host RAM{speed})"
        return None

    def _more_hardware(self, strategy: Strategy) -> str:
        zero = 3 if strategy.ranks > 1 or strategy.engine == "deepspeed" else 0
        smallest = self.candidate(_with_zero(replace(strategy, recompute="full", micro_batch=1), zero))
        for ranks in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
            if ranks <= strategy.ranks or self.machine.card is None:
                continue
            more = _with_zero(replace(strategy, ranks=ranks, recompute="full", micro_batch=1), 3)
            search = Search(
                self.counts,
                replace(self.work, batch_sequences=max(self.work.batch_sequences, ranks)),
                replace(self.machine, ranks=ranks, lanes=None),
                self.constants,
            )
            if search.fits(search.candidate(more)):
                return f"{ranks} such cards with zero: 3 and recompute: full would fit"
        card, host = self.overflow(smallest)
        if card:
            name = f"zero: {zero} with recompute: full" if zero else "recompute: full"
            return f"even {name} needs {show_bytes(card)} more per card: take a smaller model"
        return f"with zero: {zero}, recompute: full and micro-batch 1 add {show_bytes(host)} of host RAM or take a smaller model"


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Leave out what differs in name only: one micro-batch is reduced once whichever way it is called."""
    seen, found = set(), []
    for c in candidates:
        key = (c.strategy.engine, c.strategy.zero, c.strategy.recompute, c.strategy.micro_batch, c.job.offload)
        if c.job.accumulation > 1 or key not in seen:
            found.append(c)
        if c.job.accumulation == 1:
            seen.add(key)
    return found


def _with_zero(strategy: Strategy, zero: int) -> Strategy:
    return replace(strategy, zero=zero, reduce_gradients="every_micro_batch" if zero >= 2 else "once_per_step")


def strategies(section: StrategySection, ranks: int, work: Work, frozen: bool = False) -> Iterator[Strategy]:
    """Yield every strategy of today's engines that the section leaves open; `frozen`: adapters alone are trained."""
    deepspeed = section.engine == "deepspeed"
    if ranks == 1 and not deepspeed:  # DeepSpeed's offload needs a stage on one rank too
        zeros = [0]
    else:
        replicas = section.data != "auto"  # whole copies, as many as asked for
        zeros = [section.zero] if section.zero != "auto" else [0] if replicas else [0, 3] if frozen else [0, 1, 2, 3]
    data_ranks = max(1, ranks // (section.pipeline * section.context * section.tensor))
    recomputes: list[Recompute] = ["none", "selective", "full"] if section.recompute == "auto" else [section.recompute]
    micros = micro_batches(data_ranks, work) if section.micro_batch == "auto" else [section.micro_batch]
    for zero in zeros:
        # zero 2 that reduces once per step holds and sends what zero 1 does: one line of the table is enough.
        reduces: list[Any] = {2: ["every_micro_batch"], 3: ["every_micro_batch", "once_per_step"]}.get(
            zero, ["once_per_step"]
        )
        if deepspeed:  # its stages 2 and 3 know one way
            reduces = reduces[:1]
        if frozen:  # adapters' gradients are few: one way is enough
            reduces = reduces[-1:]
        if section.reduce_gradients != "auto":
            reduces = [section.reduce_gradients]
        for reduce in reduces:
            for recompute in recomputes:
                for micro in micros:
                    yield Strategy(
                        engine=section.engine,
                        zero=zero,
                        ranks=ranks,
                        micro_batch=micro,
                        recompute=recompute,
                        reduce_gradients=reduce,
                        compile=section.compile,
                        tensor=section.tensor,
                        pipeline=section.pipeline,
                        expert=section.expert,
                        context=section.context,
                        offload_optimizer=section.offload.optimizer,
                        offload_weights=section.offload.weights,
                        offload_activations=section.offload.activations,
                    )


# Keys of the recipe that, once given, leave no room for another engine or for offload of its own.
OPEN_FOR_OFFLOAD = {
    "engine",
    "zero",
    "data",
    "offload",
    "compile",
    "reduce_gradients",
    "tensor",
    "pipeline",
    "expert",
    "context",
}


def offloaded(section: StrategySection, ranks: int, work: Work, deepspeed: bool) -> Iterator[Strategy]:
    """Yield the strategies with the optimizer, or the weights too, in host memory. Native's hold both or neither."""
    zeros = [2, 3] if section.zero == "auto" else [z for z in (section.zero,) if z in (2, 3)]
    recomputes: list[Recompute] = ["none", "selective", "full"] if section.recompute == "auto" else [section.recompute]
    micros = micro_batches(ranks, work) if section.micro_batch == "auto" else [section.micro_batch]
    kinds = [("deepspeed", z, w) for z in zeros for w in (("none",), ("none", "cpu"))[z == 3]] if deepspeed else []
    kinds += [("native", z, "none") for z in (zeros if ranks > 1 else [0])]
    for engine, zero, weights in kinds:
        for recompute in recomputes:
            for micro in micros:
                yield Strategy(
                    engine=engine,
                    zero=zero,
                    ranks=ranks,
                    micro_batch=micro,
                    recompute=recompute,
                    reduce_gradients="every_micro_batch" if zero else "once_per_step",
                    offload_optimizer="cpu",
                    offload_weights=weights,
                )


def micro_batches(data_ranks: int, work: Work) -> list[int]:
    """Return the micro-batches worth trying: rows per data rank over 1, 2, 3, … steps, each evened out."""
    rows = max(1, ceil(work.batch_sequences / data_ranks))
    largest = max(1, min(rows, LARGEST_MICRO_TOKENS // work.sequence_tokens))
    found = {ceil(rows / n) for n in range(1, rows + 1)}
    usable = sorted(m for m in found if m <= largest)
    if len(usable) <= 14:
        return usable
    return sorted({usable[round(i * (len(usable) - 1) / 13)] for i in range(14)})  # spread over the whole range


def moments_of(search: Search, candidate: Candidate) -> dict[str, dict[str, int]]:
    return moments(search.counts, candidate.job, search.constants, on_gpu=search.machine.card is not None)
