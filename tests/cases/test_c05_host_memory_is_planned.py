"""C05: what an offloaded run needs of the host is said beforehand, pinned buffers and loading included."""

from __future__ import annotations

from tercet.planner.answer import plan
from tercet.planner.job import Job
from tercet.planner.ledger import host_rows
from tercet.spec.counts import Counts
from tercet.spec.families import preset


def test_the_need_counts_states_pinned_buffers_inputs_and_loading():
    counts = Counts(preset("deepseek-llm-7b"))
    base = Job(ranks=3, micro_batch=1, sequence=2048, accumulation=4, zero=2, master_bytes=4)
    rows = host_rows(counts, base, machine_is_cpu=False)
    assert rows["states"] == rows["pinned"] == 0
    offloaded = Job(
        ranks=3,
        micro_batch=1,
        sequence=2048,
        accumulation=4,
        zero=2,
        master_bytes=4,
        offload=frozenset({"optimizer", "gradients"}),
    )
    rows = host_rows(counts, offloaded, machine_is_cpu=False)
    assert rows["states"] == 12 * counts.parameters  # 82.9 GB
    assert rows["pinned"] == 4 * counts.parameters  # fp32 gradients: 110.6 GB together
    assert rows["inputs"] > 0 and rows["loading"] >= 4 * counts.largest_tensor
    weights = Job(
        ranks=3,
        micro_batch=1,
        sequence=2048,
        zero=3,
        master_bytes=4,
        offload=frozenset({"optimizer", "weights"}),
    )
    more = host_rows(counts, weights, machine_is_cpu=False)
    assert more["states"] == 14 * counts.parameters and more["pinned"] > rows["pinned"]


def test_a_host_that_is_too_small_is_refused_with_numbers():
    keys = ["strategy=ddp", "train.precision=fp32"]
    answer = plan("llama-3.2-1b", keys, ranks=3, host_ram="20GB", sequence="512", batch="12")
    assert not answer["strategies"]
    (why,) = {w.split(";")[0] for r in answer["refused"] for w in r["why"] if r["strategy"]["recompute"] == "full"}
    assert "of host RAM, 20.0 GB are there" in why and "more needed" in why
    assert plan("llama-3.2-1b", keys, ranks=3, host_ram="200GB", sequence="512", batch="12")["strategies"]
