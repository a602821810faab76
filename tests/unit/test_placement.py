"""Placements: every row of a tensor is updated once, whatever cuts it; adapters are beside a frozen model."""

from __future__ import annotations

import pytest
import torch
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import tiny_model

from tercet.planner.job import Job
from tercet.planner.ledger import states
from tercet.spec.adapter import Adapter, with_adapter
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.placement import Rules, region


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64, 65, 160])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_regions_are_the_chunks_that_torch_makes(rows, parts):
    regions = [region(rows, parts, n) for n in range(parts)]
    chunks = torch.arange(rows).chunk(parts)
    assert [r.rows for r in regions] == [*map(len, chunks), *[0] * (parts - len(chunks))]
    assert [list(range(r.begin, r.end)) for r in regions[: len(chunks)]] == [c.tolist() for c in chunks]
    assert {r.stored for r in regions} == {len(chunks[0])}


def test_what_is_placed_elsewhere_is_not_on_the_card():
    (tensor, *_) = tiny_model().tensors()
    for place in ("card", "host", "file"):
        rules = Rules(cut="even", parts=3, states_in=place, masters_in=place, master=4)
        where = {h.row: h.place for h in rules.place(tensor).held if h.bytes}
        assert where["optimizer"] == where["master"] == place
        assert where["weights"] == "card"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_ranks_together_hold_each_state_once_or_each_their_own(zero):
    counts = Counts(tiny_deepseek())
    job = Job(ranks=3, micro_batch=1, sequence=16, zero=zero, master_bytes=4)
    moments = sum(states(counts, job, rank)["between_steps"]["optimizer"] for rank in range(3))
    tensors = (
        3 * sum(n for _, n in counts.tensors) if zero == 0 else sum(counts.held_tensors(3, rank) for rank in range(3))
    )
    assert moments == 8 * counts.parameters * (3 if zero == 0 else 1) + 4 * tensors


def test_adapters_stand_beside_a_frozen_model():
    """LoRA of rank 16 on Llama 3.1 8B's attention and feed-forward: 41.9 M parameters, as PEFT counts them."""
    model = preset("llama-3.1-8b")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = with_adapter(model, Adapter(rank=16, alpha=32, targets=targets))
    counts = Counts(adapted)
    assert counts.trained_parameters == 41_943_040
    assert counts.parameters == model.parameters + 41_943_040
    names = {t.name for t in adapted.tensors()} - {t.name for t in model.tensors()}
    assert len(names) == 2 * 7 * 32
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert counts.active_matmul_flops() == Counts(model).active_matmul_flops()
    # What is frozen has neither gradients nor states.
    rows = states(counts, Job(ranks=1, micro_batch=1, sequence=16, weight_bytes=4, frozen_bytes=2))["peak"]
    assert rows["gradients"] == 4 * counts.trained_parameters and rows["optimizer"] == 8 * counts.trained_parameters
    assert rows["weights"] == 2 * model.parameters + 4 * counts.trained_parameters
