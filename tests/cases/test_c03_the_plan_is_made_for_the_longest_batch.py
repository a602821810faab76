"""C03: memory is planned for full rows and the first step takes what the longest takes: no late batch needs more."""

from __future__ import annotations

import pytest
import torch

from tercet.data.loader import Loader
from tercet.parallel.world import World
from tercet.planner.constants import load
from tercet.planner.job import of_strategy
from tercet.planner.ledger import ledger_for, phases
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.strategy import Strategy, Work
from tests.cases.test_c02_evaluation_keeps_only_sums import Live
from tests.texts import made, sentence, write_rows
from tests.tiny import tiny_engine, tiny_model, tiny_strategy

TOKENS, ROWS = 128, 1


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


def test_no_step_takes_more_than_the_full_row_that_is_planned(tmp_path):
    """Real steps over texts of unequal lengths, one a row: the bytes made and alive at each step's peak."""
    model = tiny_model(vocabulary=300, context_tokens=TOKENS)
    path = write_rows(tmp_path / "rows.jsonl", [sentence(n, words) for n, words in enumerate((24, 27, 30, 33, 36))])
    loader = Loader(made(tmp_path, path, sequence_tokens=TOKENS), ROWS, 0)
    strategy = tiny_strategy("single", 1, ROWS, ROWS, tokens=TOKENS)
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), strategy, model=model)

    def peak(batches) -> int:
        with Live() as live:
            engine.step(batches, 1e-3)
        return live.peak

    steps = [loader.micro_batches(n, rank=0, ranks=1, micro_batch=ROWS) for n in range(5)]
    used = [b.trained_tokens for (b,) in steps]
    assert max(used) > 1.4 * min(used)
    peaks = [peak(batches) for batches in steps]
    full = steps[0]
    full[0].labels[:] = full[0].input_ids
    planned = ledger_for(Counts(model), strategy, Work(TOKENS, ROWS, "fp32"), on_gpu=False)["peak"]
    room = sum(planned[row] for row in ("gradients", "activations", "logits", "buffers"))
    assert max(peaks) <= peak(full) <= room < 1.2 * peak(full)


@pytest.mark.slow
def test_a_step_that_does_not_fit_says_so_at_once_with_rank_rows_and_a_way(cli):
    """What cannot hold the planned rows is met at step 1, however short the first texts are."""
    cli.inject("""
        import torch
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        def step(self, batches, *args):
            if RANK == 1 and batches[0].input_ids.numel() > 63:
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return plain(self, batches, *args)
        m.NativeEngine.step = step
    """)
    done = cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", code=1)
    assert "rank 1, step 1, rows " in done.stderr
    assert "out of memory: tried to allocate 2 GiB" in done.stderr
    assert "strategy.micro_batch" in done.stderr and "tercet plan" in done.stderr
