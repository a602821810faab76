"""Placements: every row of a tensor is updated once, whatever cuts it; adapters are beside a frozen model."""

from __future__ import annotations

import pytest
import torch
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import tiny_engine, tiny_model, tiny_strategy

from tercet.model.quantized import NF4Linear
from tercet.parallel.world import World
from tercet.planner.job import Job, of_strategy
from tercet.planner.ledger import host_rows, ledger_for, states
from tercet.spec.adapter import Adapter, with_adapter
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.placement import Rules, region
from tercet.spec.strategy import Work


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


def held_bytes(tensors) -> int:
    """Return the bytes of these tensors' memory, each once, however many views there are of it."""
    memory = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
@pytest.mark.parametrize(("word", "precision"), [("single", "bf16"), ("single", "bf16-pure"), ("host", "bf16")])
def test_states_in_eight_bits_and_weights_as_they_lie(word, precision, optimizer):
    """Counted at the tensors themselves: not by the engine's own report, which other tests hold to the plan."""
    model = tiny_model(width=64, ffn=300)  # rows of 64 and 300: blocks, and one of two that is not full
    strategy, work = tiny_strategy(word, 1, 2), Work(16, 2, precision, optimizer)
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), strategy, precision, model, name=optimizer)
    parts = engine.layout.parts
    moments = held_bytes(t for p in parts for t in engine.optimizer.state[p.value].values())
    masters = held_bytes(p.value for p in parts)
    if word == "host":
        host = host_rows(Counts(model), of_strategy(strategy, work), True)
        assert host["states"] == moments + masters + masters // 2  # what computes lies as its masters do, in bf16
    else:
        rows = ledger_for(model, strategy, work)["between_steps"]
        assert (rows["optimizer"], rows["master"] or rows["weights"]) == (moments, masters)
    whole = 8 * model.parameters
    assert moments < 0.3 * whole if optimizer == "adamw-8bit" else moments == whole + 4 * len(parts)


def test_a_frozen_base_in_four_bits_as_it_lies():
    model = with_adapter(tiny_model(), Adapter(rank=4, alpha=8, quantize="nf4"))
    strategy = tiny_strategy("single", 1, 2)
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), strategy, "bf16", model)
    held = [
        *engine.module.parameters(),
        *(b for m in engine.module.modules() if isinstance(m, NF4Linear) for b in m.buffers()),
    ]
    rows = ledger_for(model, strategy, Work(16, 2, "bf16", quantize="nf4"))["between_steps"]
    assert rows["weights"] == held_bytes(held)
    plain = with_adapter(tiny_model(), Adapter(rank=4, alpha=8))
    assert rows["weights"] < 0.7 * ledger_for(plain, strategy, Work(16, 2, "bf16"))["between_steps"]["weights"]


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
