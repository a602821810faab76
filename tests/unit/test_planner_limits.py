"""No prediction passes a physical limit, and more of anything never makes the best plan worse; random recipes and machines."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tercet.planner.constants import load
from tercet.planner.search import Search
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.machine import BOOST, Machine, find_gpu
from tercet.spec.recipe import StrategySection
from tercet.spec.strategy import Work

MODELS = ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b", "deepseek-v2-lite", "deepseek-llm-7b")
CARDS = ("RTX 4090", "RTX 3090", "A100 PCIe 80GB", "H100 SXM 80GB", "RTX 4060 Ti 16GB", "A10G 24GB")
COUNTS = {name: Counts(preset(name)) for name in MODELS}
SLACK = 1.02  # the search takes differences below half a percent as none


@st.composite
def jobs(draw) -> tuple[Counts, Work, Machine]:
    counts = COUNTS[draw(st.sampled_from(MODELS))]
    tokens = draw(st.sampled_from((256, 1024, 2048, 4096)))
    ranks = draw(st.integers(1, 8))
    lanes = tuple(draw(st.sampled_from((4, 8, 16))) for _ in range(ranks))
    card = find_gpu(draw(st.sampled_from(CARDS)))
    host = draw(st.sampled_from((32, 64, 128, 256, 1024))) * 2**30
    work = Work(min(tokens, counts.model.context_tokens), draw(st.integers(1, 200)))
    return counts, work, Machine(ranks, card, lanes, host)


def best(counts: Counts, work: Work, machine: Machine):
    return Search(counts, work, machine, load()).run(StrategySection(), machine.ranks, deepspeed=True)


def speed(counts: Counts, work: Work, machine: Machine) -> float:
    fits = best(counts, work, machine).fits
    return fits[0].tokens_per_second or 0.0 if fits else 0.0


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@seed(1)
@examples(6)
@given(jobs())
def test_no_figure_passes_a_limit(job):
    no_figure_passes_a_limit(*job)


def no_figure_passes_a_limit(counts: Counts, work: Work, machine: Machine) -> None:
    card = machine.card
    assert card is not None
    peak = max(card.flops["bf16"], 0) * (BOOST if card.geforce else 1.0)
    for found in best(counts, work, machine).fits:
        strategy, seconds = found.strategy, found.seconds
        assert seconds
        per_rank = strategy.accumulation(work.batch_sequences) * strategy.micro_batch * work.sequence_tokens
        again = {"none": 3, "selective": 3, "full": 4}[strategy.recompute]
        executed = again * counts.active_matmul_flops() * per_rank
        assert executed <= peak * seconds, found
        # Bytes that must move: the optimizer's on the card, or over the link to the host and back.
        own = counts.parameters / (strategy.ranks if strategy.zero else 1)
        if "optimizer" not in found.job.offload:
            assert own * 3 * 8 <= card.bandwidth * seconds
        elif strategy.zero:
            link = min(x for x in machine.host_links() if x)
            assert own * 4 <= link * seconds
        assert 0 < found.need <= card.usable_bytes
        assert found.host_need <= (machine.host_bytes or 0)
        assert found.tokens_per_second * seconds == pytest.approx(work.batch_sequences * work.sequence_tokens)


@seed(2)
@examples(3)
@given(jobs())
def test_more_of_anything_is_never_worse(job):
    more_of_anything_is_never_worse(*job)


def more_of_anything_is_never_worse(counts: Counts, work: Work, machine: Machine) -> None:
    usual = speed(counts, work, machine)
    card = machine.card
    assert card is not None and machine.host_bytes is not None
    assert usual <= SLACK * speed(counts, work, replace(machine, host_bytes=2 * machine.host_bytes)), "host memory"
    wider = replace(machine, lanes=(16,) * machine.ranks)
    assert usual <= SLACK * speed(counts, work, wider), "links"
    larger = replace(card, usable_bytes=2 * card.usable_bytes, memory_bytes=2 * card.memory_bytes)
    assert usual <= SLACK * speed(counts, work, replace(machine, card=larger)), "memory per card"
    twice = replace(work, batch_sequences=2 * work.batch_sequences)
    assert usual <= SLACK * speed(counts, twice, machine), "batch"


@seed(3)
@examples(5)
@given(jobs())
def test_ways_out_fit_when_they_are_taken(job):
    ways_out_fit_when_they_are_taken(*job)


def ways_out_fit_when_they_are_taken(counts: Counts, work: Work, machine: Machine) -> None:
    search = Search(counts, work, machine, load())
    for refused in best(counts, work, machine).refused[:6]:
        (why, *_), strategy = refused.why, refused.strategy
        _, _, way = why.partition("; ")
        if found := re.search(r"recompute: (\w+) saves", way):
            assert search.fits(search.candidate(replace(strategy, recompute=found[1]))), why  # type: ignore[arg-type]
        elif found := re.search(r"zero: (\d) saves", way):
            reduce = "every_micro_batch" if int(found[1]) >= 2 else "once_per_step"
            changed = replace(strategy, zero=int(found[1]), reduce_gradients=reduce)
            assert search.fits(search.candidate(changed)), why
        elif found := re.search(r"(\d+) instead of \d+ tokens per sequence", way):
            shorter = replace(work, sequence_tokens=int(found[1]))
            assert search.fits(search.candidate(strategy, shorter)), why
        elif found := re.search(r"add ([\d.]+) GB of host RAM", way):
            more = replace(machine, host_bytes=machine.host_bytes + ceil(float(found[1]) * 1.01e9) + 10**8)
            larger = Search(counts, work, more, load())
            assert larger.fits(larger.candidate(strategy)), why


@pytest.mark.slow
@pytest.mark.parametrize(
    "holds", [no_figure_passes_a_limit, more_of_anything_is_never_worse, ways_out_fit_when_they_are_taken]
)
def test_on_many_more(holds):
    seed(4)(examples(60)(given(jobs())(lambda job: holds(*job))))()
