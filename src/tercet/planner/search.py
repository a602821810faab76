"""Every legal strategy for a machine, ranked by predicted speed; each refusal with its reason and a way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import ceil
from typing import Any, get_args

from tercet.planner.clock import clock, collectives, step_seconds
from tercet.planner.constants import Constants, about
from tercet.planner.job import Job, of_strategy
from tercet.planner.ledger import host_rows, moments, phases
from tercet.planner.legal import refusals
from tercet.planner.ranges import LIKELY, out_of_memory_chance
from tercet.spec.counts import Counts
from tercet.spec.machine import Machine
from tercet.spec.recipe import StrategySection
from tercet.spec.strategy import Recompute, Strategy, Work

LARGEST_MICRO_TOKENS = 65_536  # beyond this a matmul gains nothing, and only memory grows
MOST_MICRO_BATCHES, ALL_BELOW = 14, 8  # tried, of many; and up to which size all of them
LEVELS = get_args(Recompute)  # least to most
SEARCHED: list[Recompute] = ["none", "selective", "every-3", "every-2", "full"]
HOST_STEP = 4 * 2**30  # host memory that is no reason to take another strategy
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
    def effort(self) -> tuple[Any, ...]:
        """What decides between speeds that a prediction cannot tell apart: an extra install, then host memory."""
        return self.strategy.engine == "deepspeed", round(self.host_need / HOST_STEP)

    @property
    def group(self) -> tuple[Any, ...]:
        """What makes two candidates one line of the table: all but micro-batch."""
        s = self.strategy
        offload = (s.offload_optimizer, s.offload_weights, s.offload_activations)
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


def near() -> float:
    """Return the relative difference in speed that predictions cannot tell apart: half of all rows miss by more."""
    return about().get("tokens_median", 0.05)


def _log(value: float) -> float:
    from math import log

    return log(value)


def ranked(found: Iterable[Candidate], near: float) -> list[Candidate]:
    """Return candidates fastest first; of those within `near` of the fastest that is left, the least effort first."""
    left, result = sorted(found, key=Candidate.order), []
    while left:
        bar = (left[0].tokens_per_second or 0.0) / (1 + near)
        same = [c for c in left if (c.tokens_per_second or 0.0) >= bar]
        result += sorted(same, key=lambda c: (c.effort, c.order())) if bar else same
        left = [c for c in left if c not in same]
    return result


@dataclass(frozen=True)
class Refusal:
    """`tried` is what does not fit; None where the strategy is not legal here."""

    strategy: Strategy
    why: list[str]
    tried: Candidate | None = None


@dataclass(frozen=True)
class SearchResult:
    fits: list[Candidate]  # best first, one per group
    refused: list[Refusal]


class Search:
    """Predicts strategies of one model, work and machine."""

    def __init__(
        self, counts: Counts, work: Work, machine: Machine, constants: Constants, as_run: dict[str, Any] | None = None
    ):
        """`as_run`: fields of Job that a foreign engine's file decides, instead of how our engine asks for it."""
        self.counts, self.work, self.machine, self.constants = counts, work, machine, constants
        self.as_run = as_run or {}

    def candidate(self, strategy: Strategy, work: Work | None = None) -> Candidate:
        job = of_strategy(strategy, work or self.work, self.counts.model.module)
        if self.as_run and strategy.engine == "deepspeed":
            job = replace(job, **self.as_run)
        machine = self.machine.with_ranks(strategy.ranks) if strategy.ranks != self.machine.ranks else self.machine
        on_gpu = machine.card is not None
        need = max(phases(self.counts, job, self.constants, on_gpu=on_gpu).values())
        host = sum(host_rows(self.counts, job, not on_gpu, self.machine.host_bytes).values())
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

    def chance(self, candidate: Candidate) -> float | None:
        """Return how likely a run of it is to run out of the card's memory; None on a CPU."""
        return out_of_memory_chance(candidate.need, candidate.job, self.machine, self.constants)

    def tight(self, candidate: Candidate) -> bool:
        """Whether it fits the host and, without the room that an allocator likes, more likely than not the card."""
        chance = self.chance(candidate)
        return not self.overflow(candidate)[1] and chance is not None and chance < LIKELY

    def open_for_offload(self, section: StrategySection) -> bool:
        """Whether the section leaves it to the search to move the optimizer to the host."""
        frozen = self.counts.model.frozen  # adapters have no states worth moving
        return self.machine.card is not None and not frozen and not OPEN_FOR_OFFLOAD & section.model_fields_set

    def run(self, section: StrategySection, ranks: int, deepspeed: bool = False, files: bool = False) -> SearchResult:
        """Return all groups of strategies that the section leaves open on `ranks` workers.

        Offload to the host is tried too where the machine has cards and the section leaves it open; with DeepSpeed's
        engine if `deepspeed`, and in its files on NVMe if `files` and the cards alone do not hold the states.
        """
        best: dict[tuple[Any, ...], Candidate] = {}
        too_large: dict[tuple[Any, ...], Candidate] = {}
        illegal: dict[str, Refusal] = {}
        asked_for = list(strategies(section, ranks, self.work, self.counts.model.frozen))
        offered: Iterator[Strategy] = iter(())
        if self.open_for_offload(section):
            alone = any(self.fits(self.candidate(s)) for s in asked_for if s.micro_batch == 1)
            offered = offloaded(section, ranks, self.work, deepspeed, files and deepspeed and not alone)
        for strategy, asked in chain(((s, True) for s in asked_for), ((s, False) for s in offered)):
            why = refusals(self.counts.model, strategy, self.work, self.machine)
            if why and not asked:
                continue
            if why:
                illegal.setdefault("\n".join(why), Refusal(strategy, why))
                continue
            found = self.candidate(strategy)
            chosen = best if self.fits(found) else too_large
            known = chosen.get(found.group)
            better = known is None or (found.order() < known.order() if chosen is best else found.need < known.need)
            if better:
                chosen[found.group] = found
        if not best:  # nothing fits with room to spare: what is likelier to fit than not is better than a refusal
            best = {group: c for group, c in too_large.items() if self.tight(c)}
        fits = ranked(_distinct(sorted(best.values(), key=Candidate.order)), near())
        refused = [r for r in illegal.values() if not fits or r.strategy.micro_batch == 1]
        refused += [
            Refusal(c.strategy, [], c)
            for group, c in sorted(too_large.items(), key=lambda item: item[1].need)
            if group not in best
        ]
        return SearchResult(fits, refused)


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


def with_zero(strategy: Strategy, zero: int) -> Strategy:
    return replace(strategy, zero=zero, reduce_gradients="every_micro_batch" if zero >= 2 else "once_per_step")


def strategies(section: StrategySection, ranks: int, work: Work, frozen: bool = False) -> Iterator[Strategy]:
    """Yield every strategy of today's engines that the section leaves open; `frozen`: adapters alone are trained."""
    deepspeed, host = section.engine == "deepspeed", section.engine == "host"
    if host or (ranks == 1 and not deepspeed):  # DeepSpeed's offload needs a stage on one rank too
        zeros = [0]
    else:
        replicas = section.data != "auto"  # whole copies, as many as asked for
        zeros = [section.zero] if section.zero != "auto" else [0] if replicas else [0, 3] if frozen else [0, 1, 2, 3]
    data_ranks = max(1, ranks // (section.pipeline * section.context * section.tensor))
    levels: list[Recompute] = ["full"] if host else SEARCHED
    recomputes: list[Recompute] = levels if section.recompute == "auto" else [section.recompute]
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


def offloaded(
    section: StrategySection, ranks: int, work: Work, deepspeed: bool, files: bool = False
) -> Iterator[Strategy]:
    """Yield the strategies with the optimizer, or the weights too, in host memory. Native's hold both or neither; `host`
    holds everything there.

    `files`: also those with them in files on NVMe, which is DeepSpeed's zero 3 alone.
    """
    zeros = [2, 3] if section.zero == "auto" else [z for z in (section.zero,) if z in (2, 3)]
    recomputes: list[Recompute] = SEARCHED if section.recompute == "auto" else [section.recompute]
    micros = micro_batches(ranks, work) if section.micro_batch == "auto" else [section.micro_batch]
    kinds = [("native", z, "cpu", "none") for z in (zeros if ranks > 1 else [0])]
    if section.recompute in ("auto", "full"):
        kinds.append(("host", 0, "none", "none"))
    if deepspeed:
        kinds += [("deepspeed", z, "cpu", w) for z in zeros for w in (("none",), ("none", "cpu"))[z == 3]]
    if files and 3 in zeros:
        kinds += [("deepspeed", 3, "nvme", w) for w in ("none", "nvme")]
    for engine, zero, optimizer, weights in kinds:
        for recompute in recomputes if engine != "host" else ("full",):
            for micro in micros:
                yield Strategy(
                    engine=engine,
                    zero=zero,
                    ranks=ranks,
                    micro_batch=micro,
                    recompute=recompute,
                    reduce_gradients="every_micro_batch" if zero else "once_per_step",
                    offload_optimizer=optimizer,
                    offload_weights=weights,
                )
    yield from _inputs_away(section, ranks, micros)


def _inputs_away(section: StrategySection, ranks: int, micros: list[int]) -> Iterator[Strategy]:
    """Yield the native strategies whose blocks' inputs wait on the host, the optimizer's state there or not."""
    if section.recompute not in ("auto", "full"):
        return
    zeros = ([3] if section.zero == "auto" else [section.zero]) if ranks > 1 else [0]
    for zero, optimizer, micro in product(zeros, ("none", "cpu"), micros):
        plain = Strategy(ranks=ranks, micro_batch=micro, recompute="full")
        yield replace(with_zero(plain, zero), offload_optimizer=optimizer, offload_activations="cpu")


def micro_batches(data_ranks: int, work: Work) -> list[int]:
    """Return the micro-batches worth trying: rows per data rank over 1, 2, 3, … steps, each evened out."""
    rows = max(1, ceil(work.batch_sequences / data_ranks))
    largest = max(1, min(rows, LARGEST_MICRO_TOKENS // work.sequence_tokens))
    # m is rows over some number of steps, evened out, exactly when it is that over the fewest steps of m rows.
    usable = [m for m in range(1, largest + 1) if -(-rows // -(-rows // m)) == m]
    if len(usable) <= MOST_MICRO_BATCHES:
        return usable
    # All small ones, for there one sequence more is much; the others spread over what is left.
    small, large = [m for m in usable if m <= ALL_BELOW], [m for m in usable if m > ALL_BELOW]
    last = MOST_MICRO_BATCHES - len(small) - 1
    return sorted({*small, *(large[round(i * (len(large) - 1) / last)] for i in range(last + 1))})


def moments_of(search: Search, candidate: Candidate) -> dict[str, dict[str, int]]:
    return moments(search.counts, candidate.job, search.constants, on_gpu=search.machine.card is not None)
