"""What doctor measured rules: each rate alone, made slower, makes the plan that depends on it slower."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest

from tercet.planner.answer import answer_for, plan, predict
from tercet.planner.constants import load, load_for
from tercet.probe import processor
from tercet.spec import machine as machines
from tercet.spec.machine import Machine, find_gpu, machine_of
from tercet.spec.recipe import build_recipe, load_recipe
from tercet.spec.strategy import Strategy

CARD = {
    "matmul_bf16": 150e12,
    "memory": 800e9,
    "host_to_card": 20e9,
    "all_reduce": 6e9,
    "all_gather": 6e9,
    "reduce_scatter": 6e9,
    "collective_latency": 40e-6,
    "cpu_adam": 1e9,
    "disk_write": 3e9,
}
OPTIMIZER = {"offload_optimizer": "cpu"}
CASES = [
    ("matmul_bf16", {}),
    ("memory", {}),
    ("host_to_card", OPTIMIZER),
    ("all_reduce", {"zero": 0, "reduce_gradients": "once_per_step"}),
    ("all_gather", {}),
    ("reduce_scatter", {}),
    ("collective_latency", {}),
    ("cpu_adam", OPTIMIZER),
    ("disk_write", {"engine": "deepspeed", "offload_optimizer": "nvme"}),
]


def speed(machine: Machine, **keys) -> float:
    recipe = build_recipe({"model": "llama-3.2-1b", "data": {"train": "-"}})
    strategy = Strategy(**{"ranks": 3, "zero": 3, "micro_batch": 4, "reduce_gradients": "every_micro_batch", **keys})
    return predict(recipe, strategy, machine)["tokens_per_second"]


@pytest.mark.parametrize(("rate", "keys"), CASES)
def test_each_measured_rate_moves_the_plan(rate, keys):
    card = machine_of("3x4090", links="x16,x8,x4")  # lanes are known too, as they are on a real machine
    usual = speed(replace(card, measured=CARD), **keys)
    slower = CARD[rate] * 100 if rate == "collective_latency" else CARD[rate] / 3
    assert speed(replace(card, measured={**CARD, rate: slower}), **keys) < 0.99 * usual
    # And the constant it replaces has no say: without the measurement the answer is another.
    assert speed(replace(card, measured={**CARD, rate: slower}), **keys) != speed(card, **keys)


def test_the_hosts_optimizer_is_as_fast_as_it_was_measured():
    card = machine_of("3x4090")
    fast, slow = (replace(card, measured={"cpu_adam": rate}) for rate in (5e9, 0.1e9))
    times = {}
    for name, machine in (("fast", fast), ("slow", slow)):
        recipe = build_recipe({"model": "llama-3.2-1b", "data": {"train": "-"}})
        strategy = Strategy(ranks=3, zero=3, micro_batch=4, reduce_gradients="every_micro_batch", **OPTIMIZER)
        times[name] = predict(recipe, strategy, machine)["clock"]["optimizer"]
    assert times["slow"] == pytest.approx(1_235_814_400 / 0.1e9)
    assert times["fast"] == pytest.approx(times["slow"] / 50)


def test_a_file_edited_by_hand_changes_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    one = {"name": "NVIDIA GeForce RTX 4090", "pcie.link.width.current": "16", "memory.total": "24564"}
    monkeypatch.setattr(machines, "detect_gpus", lambda: [one] * 3)
    path = tmp_path / "tercet" / "machine.json"
    path.parent.mkdir()
    keys = ["strategy=zero3", "strategy.offload.optimizer=cpu"]

    def planned(**rates: float) -> float:
        path.write_bytes(
            orjson.dumps({"kind": "gpu", "measured": {**CARD, **rates}, "measured_at": "2026-12-01 10:00"})
        )
        return plan("llama-3.2-3b", keys, host_ram="256GB")["strategies"][0]["tokens_per_second"]

    usual = planned()
    assert planned(cpu_adam=CARD["cpu_adam"] / 10) < 0.9 * usual
    assert planned(host_to_card=CARD["host_to_card"] / 10) < 0.9 * usual
    # Links that the user describes are other links: what was measured over these says nothing of them.
    path.write_bytes(orjson.dumps({"kind": "gpu", "measured": {**CARD, "host_to_card": 1e9}, "measured_at": "now"}))
    described = plan("llama-3.2-3b", keys, host_ram="256GB", links="x16")["strategies"][0]["tokens_per_second"]
    assert described > plan("llama-3.2-3b", keys, host_ram="256GB")["strategies"][0]["tokens_per_second"]


def test_the_probes_do_not_fit_into_a_servers_cache(monkeypatch):
    seen = []
    monkeypatch.setattr(processor, "rate", lambda work, run, device, seconds=0.6: seen.append(work) or work)
    monkeypatch.setattr(processor.torch, "ones_like", lambda p: p.detach())
    free = SimpleNamespace(available=2**28)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    available = processor.probe_bytes()
    assert available == 2**26, "never more than a quarter of what is free"
    processor.cpu_adam()
    processor.memory(processor.torch.device("cpu"))
    adam, copied = seen
    assert 16 * adam == pytest.approx(available, rel=0.01) and copied == pytest.approx(available, rel=0.01)
    free.available = 2**40
    assert processor.probe_bytes() > 1.152e9, "the largest cache of a socket"


def test_only_consumer_cards_run_above_their_quoted_clock():
    for name in ("A10G 24GB", "RTX A6000", "A100 SXM 80GB"):
        assert not find_gpu(name).geforce and find_gpu(name).sustained == 1.0, name
    assert find_gpu("4090").geforce and find_gpu("3090").geforce


def test_what_a_process_holds_is_measured_and_a_runs_own_word_counts_more():
    """The plan of a CPU's rank moves by the difference, byte for byte."""
    here = Machine(ranks=3, card=None, host_bytes=24 * 2**30)
    small, large = (replace(here, measured={"process": held}) for held in (300e6, 450e6))
    assert load_for(here).cpu_process_bytes == load().cpu_process_bytes
    assert load_for(replace(small, corrections={"cpu_process_bytes": 5e8})).cpu_process_bytes == 5e8
    recipe = load_recipe("first-light", ["strategy=zero1"])
    plans = [answer_for(recipe, machine)["strategies"][0]["card_bytes"] for machine in (small, large)]
    assert plans[1] - plans[0] == pytest.approx(150e6, rel=1e-9)


@pytest.mark.slow
def test_an_idle_rank_is_measured_apart_from_who_asks():
    """A child's peak, as getrusage gives it, begins at what its parent has held."""
    held = bytearray(2 * 10**9)
    held[:: 2**12] = bytes(len(range(0, len(held), 2**12)))  # every page is touched
    assert 100e6 < processor.idle_process() < 1.5e9
