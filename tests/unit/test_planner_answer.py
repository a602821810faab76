"""tercet plan: the answer's shape, its refusals and the ways out they name, bad input, and what it must not load."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from tercet.errors import InputError, NotLegalError
from tercet.planner.answer import choose, plan
from tercet.planner.search import micro_batches, near
from tercet.planner.table import show
from tercet.spec.machine import machine_of
from tercet.spec.recipe import build_recipe
from tercet.spec.strategy import Work

LEDGER = {"weights", "master", "gradients", "optimizer", "activations", "logits", "buffers", "reserve"}


@pytest.fixture(scope="module")
def answer():
    return plan("llama-1.2b-32k", [], gpus="3x4090", links="x16,x8,x4", host_ram="64GB", price=0.4, kwh_price=0.3)


def test_the_shape_that_scripts_read(answer):
    assert json.loads(json.dumps(answer)) == answer
    for s in answer["strategies"]:
        assert s["ledger"].keys() == LEDGER
        assert s["moments"]["peak"] == s["ledger"]
        assert s["card_bytes"] <= s["usable_bytes"]
        assert s["card_bytes"] >= sum(s["ledger"].values())
        assert s["host_bytes"] > 0 and s["disk_bytes"] > 0
        assert sum(s["clock"].values()) == pytest.approx(s["step_seconds"])
        assert s["tokens_per_second"] == pytest.approx(96 * 2048 / s["step_seconds"])
        assert 0 < s["mfu"] < 1
        assert s["micro_batch"] * s["accumulation"] * 3 - s["idle_rows"] == 96
    speeds = [s["tokens_per_second"] for s in answer["strategies"]]
    assert all(a > b / (1.005 + near()) for a, b in pairwise(speeds))
    for r in answer["refused"]:
        assert r["name"] and r["why"]


def test_money_and_energy(answer):
    best = answer["strategies"][0]
    hours = best["total_seconds"] / 3600
    assert best["for"] == "a billion tokens"
    assert best["total_seconds"] == pytest.approx(1e9 / best["tokens_per_second"])
    assert best["money"] == pytest.approx(0.4 * 3 * hours)
    # Three cards at 450 W, 150 W of host, a power supply of 90 %.
    assert best["energy_money"] == pytest.approx((0.45 * 3 + 0.15) / 0.9 * hours * 0.3)


def test_the_way_out_that_a_refusal_names_is_true(answer):
    """Every refusal of this machine says a change; the change is made here and must fit."""
    machine = {"gpus": "3x4090", "links": "x16,x8,x4", "host_ram": "64GB"}
    assert answer["refused"]
    for r in answer["refused"]:
        assert not plan("llama-1.2b-32k", [f"strategy={r['name']}", *fixed(r)], **machine)["strategies"]
        keys = r["way_out"]["keys"]
        assert keys and all(key in r["why"][0] for key in keys)
        assert plan("llama-1.2b-32k", [f"strategy={r['name']}", *keys], **machine)["strategies"], r["why"]


def fixed(refused: dict[str, Any]) -> list[str]:
    """Return what a strategy's word leaves open, as the refused one has it."""
    return [] if refused["strategy"]["recompute"] != "none" else ["strategy.recompute=none"]


@pytest.mark.parametrize(
    ("name", "keys", "machine", "named"),
    [
        ("llama-1.2b-32k", ["strategy=zero3"], {"gpus": "3x4060 Ti", "sequence": "64k"}, {"sequence"}),
        ("llama-1.2b-32k", [], {"gpus": "3x4090", "sequence": "4k"}, {"model.context_tokens", "sequence"}),
        ("deepseek-llm-7b", ["strategy=zero3"], {"gpus": "3x4090"}, {"strategy", "gpus", "sequence", "method"}),
        ("deepseek-llm-7b", ["strategy=zero3+optimizer-cpu"], {"gpus": "3x4090", "host_ram": "64GiB"}, {"host_ram"}),
        ("llama-3.1-70b", [], {"gpus": "2x4090", "host_ram": "64GiB"}, {"gpus", "host_ram"}),
    ],
)
def test_each_way_out_of_a_plan_fits_when_it_is_taken(name, keys, machine, named):
    found = plan(name, keys, **machine)
    assert not found["strategies"] and found["ways_out"]
    seen = set()
    for way in found["ways_out"]:
        seen |= {key.partition("=")[0] for key in way["keys"]} | way["options"].keys()
        assert plan(name, [*keys, *way["keys"]], **{**machine, **way["options"]})["strategies"], way
    assert named <= seen


def test_host_ram_is_a_need_when_unknown_and_a_limit_when_known():
    unknown = plan("llama-1.2b-32k", [], gpus="3x4090")
    assert unknown["strategies"] and any("host RAM unknown" in a for a in unknown["assumed"])
    known = plan("llama-1.2b-32k", [], gpus="3x4090", host_ram="1GB")
    assert not known["strategies"]
    assert any("of host RAM" in w and w.endswith("short") for r in known["refused"] for w in r["why"])
    assert show(unknown).startswith("FITS if the host has ")
    assert show(plan("llama-1.2b-32k", [], gpus="3x4090", host_ram="128GB")).startswith("FITS: ")


def test_the_host_is_used_where_cards_are_too_small():
    found = plan("deepseek-llm-7b", [], gpus="3x4090")
    best = found["strategies"][0]
    assert all("optimizer" in s["offload"] for s in found["strategies"])
    assert {s["strategy"]["engine"] for s in found["strategies"]} == {"native", "deepspeed", "host"}, "to be compared"
    states = 12 * found["model"]["parameters"]
    assert best["host"]["states"] >= states and best["card_bytes"] <= best["usable_bytes"]
    enough = plan("deepseek-llm-7b", [], gpus="3x4090", host_ram="256GB")
    assert [s["name"] for s in enough["strategies"]] == [s["name"] for s in found["strategies"]]
    # Files on NVMe are ranked where the host is too small, and never taken unasked by a run: drives wear.
    small = plan("deepseek-llm-7b", [], gpus="3x4090", host_ram="64GB")
    why = [w for r in small["refused"] for w in r["why"]]
    assert any("of host RAM, 59.6 GiB are there" in w for w in why)
    files = small["strategies"][0]
    assert files["host_bytes"] < 64e9 and files["disk"]["swap"] > states
    assert all(s["strategy"]["offload_optimizer"] == "nvme" for s in small["strategies"])
    recipe = build_recipe({"model": "deepseek-llm-7b", "data": {"train": "-"}})
    with pytest.raises(NotLegalError, match="of host RAM"):
        choose(recipe, machine_of("3x4090", host_ram="64GB"), 3)
    # Where the cards suffice, or the user has said how, nobody is sent to another engine.
    fixed = plan("llama-1.2b-32k", ["strategy=zero2"], gpus="3x4090")
    assert {s["strategy"]["engine"] for s in fixed["strategies"]} == {"native"}


def test_what_is_fixed_stays_fixed():
    fixed = plan(
        "llama-1.2b-32k",
        ["strategy=zero2", "strategy.micro_batch=4", "strategy.recompute=full"],
        gpus="3x4090",
    )
    assert [(s["strategy"]["zero"], s["micro_batch"], s["recompute"]) for s in fixed["strategies"]] == [(2, 4, "full")]
    assert fixed["work"]["batch_sequences"] == 96


def test_choose_is_what_train_uses():
    recipe = build_recipe(
        {"model": "first-light", "data": {"train": "-"}},
        ["train.batch_sequences=12", "data.sequence_tokens=256"],
    )
    strategy, chosen = choose(recipe, machine_of("3x4090"), 3)
    assert strategy.ranks == 3 and chosen["strategy"] == asdict(strategy)
    assert chosen["moments"].keys() == {"between_steps", "peak"}
    large = build_recipe({"model": "llama-3.1-70b", "data": {"train": "-"}})
    with pytest.raises(NotLegalError, match="of host RAM, 179 GiB are there"):
        choose(large, machine_of("3x4090", host_ram="192GB"), 3)


@pytest.mark.parametrize(
    ("name", "machine", "words"),
    [
        ("deepseek-lm-7b", {}, "deepseek-llm-7b"),
        ("first-ligt", {}, "first-light"),
        ("first-light", {"gpus": "3x4091"}, "4090"),
        ("first-light", {"gpus": "0x4090"}, "from 1 to 1024"),
        ("first-light", {"gpus": "4090x3"}, "--gpus 3x4090"),
        ("first-light", {"gpus": "H100 SXM x 2"}, "--gpus 2xH100 SXM"),
        ("first-light", {"gpus": "3x4090", "links": "x16,x8"}, "names 2 cards"),
        ("first-light", {"gpus": "3x4090", "links": "x3"}, "x1, x2, x4"),
        ("first-light", {"gpus": "3x4090", "host_ram": "lots"}, "host-ram"),
        ("first-light", {"gpus": "2x4090", "ranks": 3}, "exceeds the 2 cards"),
        ("first-light", {"method": "dora"}, "full, lora, qlora, pretrain"),
        ("first-light", {"batch": "many"}, "batch_sequences"),
    ],
)
def test_bad_input_names_what_would_do(name, machine, words):
    with pytest.raises(InputError) as caught:
        plan(name, [], **machine)
    assert words in str(caught.value)


def test_an_unknown_architecture_says_which_keys(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 5, "state_size": 16}))
    with pytest.raises(InputError) as caught:
        plan(str(tmp_path), [], gpus="1x4090")
    for word in ("mamba", "hidden_size", "state_size"):
        assert word in str(caught.value)


def test_a_model_folder_is_planned_from_its_config_alone(tmp_path):
    config = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(str(tmp_path), [], gpus="1x4090")
    assert found["model"]["layers"] == 2 and found["work"]["sequence_tokens"] == 128


def test_adapters_are_answered():
    """torchtune's table for Llama-3.1-8B on one 4090 (bench/measurements.json): full 18.9, LoRA 16.2, QLoRA 7.4 GB."""
    keys = ["strategy.micro_batch=2", "strategy.recompute=full", "adapter.rank=8"]
    fixed: dict[str, Any] = {"gpus": "1x4090", "batch": 2, "sequence": 2048}
    lora = plan("llama-3.1-8b", keys, method="lora", **fixed)
    qlora = plan("llama-3.1-8b", keys, method="qlora", **fixed)
    for found in (lora, qlora):
        assert found["model"]["parameters"] == pytest.approx(8.03e9, rel=0.01)
        assert 1e7 < found["model"]["trained_parameters"] < 5e7
    ledgers = [found["strategies"][0]["ledger"] for found in (lora, qlora)]
    assert ledgers[0]["weights"] > 16e9 and ledgers[1]["weights"] < 7e9
    assert all(ledger["gradients"] + ledger["optimizer"] < 1e9 for ledger in ledgers)


def test_a_large_frozen_base_is_shared_by_the_cards():
    one, two = (plan("llama-3.1-70b", [], gpus=f"{n}xH100 SXM", method="qlora", batch=8) for n in (1, 2))
    assert one["strategies"][0]["strategy"]["zero"] == 0
    shared = next(s for s in two["strategies"] if s["strategy"]["zero"] == 3)
    assert shared["ledger"]["weights"] < 0.6 * one["strategies"][0]["ledger"]["weights"]


def test_plan_loads_no_torch():
    code = (
        "import sys; from tercet.planner.answer import plan; from tercet.planner.table import show;"
        "print(len(show(plan('deepseek-llm-7b', [], gpus='3x4090'))));"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys(), 'something heavy was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_search_tries_few_micro_batches_however_many_rows():
    assert micro_batches(3, Work(2048, 96)) == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32]
    assert len(micro_batches(64, Work(128, 100_000))) <= 14
    assert len(micro_batches(3, Work(32, 10**12))) <= 14  # at once
    for ranks in (1, 3, 64):
        for batch in (1, 5, 96, 4096):
            assert all(1 <= m <= -(-batch // ranks) for m in micro_batches(ranks, Work(512, batch)))


def test_text_shows_table_refusals_and_assumptions(answer):
    text = show(answer, details=True)
    for word in ("tokens/s", "zero1", "Refused:", "Assumed:", "GiB at the peak", "at the given price"):
        assert word in text
