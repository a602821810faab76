"""C03 (planner): memory is planned for full rows, so no late, long batch can need more than the plan."""

from __future__ import annotations

from tercet.planner.constants import load
from tercet.planner.job import of_strategy
from tercet.planner.ledger import ledger_for, phases
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.strategy import Strategy, Work


def test_need_grows_with_every_token_and_row():
    counts = Counts(preset("llama-3.2-1b"))
    needs = []
    for micro, tokens in ((1, 8), (1, 512), (2, 512), (2, 2048), (4, 2048)):
        rows = ledger_for(counts, Strategy(micro_batch=micro), Work(tokens, 8), on_gpu=True)["peak"]
        needs.append(sum(rows.values()))
    assert needs == sorted(needs) and len(set(needs)) == len(needs)


def test_the_need_is_the_worst_of_all_phases():
    counts = Counts(preset("llama-3.2-1b"))
    job = of_strategy(Strategy(ranks=3, zero=3, micro_batch=2, reduce_gradients="every_micro_batch"), Work(2048, 96))
    found = phases(counts, job, load())
    assert found.keys() == {"load", "backward", "step", "evaluation", "save", "resume"}
    assert max(found.values()) == found["backward"]
