"""Machines in a user's words: host memory, power limit, peer access, disk, cards that differ; each changes the plan."""

from __future__ import annotations

import pytest

from tercet.errors import InputError
from tercet.planner.answer import plan
from tercet.spec.described import parse_host
from tercet.spec.machine import find_gpu, machine_of, parse_gpus

OFFLOAD = ["strategy=zero3+full+optimizer-cpu", "strategy.micro_batch=2"]
ON_NVME = ["strategy=deepspeed-zero3+full+optimizer-nvme", "strategy.micro_batch=2"]


def best(model: str, keys: list[str] = [], **machine) -> dict:  # noqa: B006
    return plan(model, keys, **{"gpus": "3x4090", "host_ram": "512GiB", **machine})["strategies"][0]


def test_memory_channels_set_the_speed_of_the_hosts_optimizer():
    speeds = [
        best("llama-3.2-1b", OFFLOAD, host=host, batch=6)["tokens_per_second"]
        for host in ("7950X 2xDDR5-3600", "7950X 2xDDR5-5600", "EPYC 9354 12xDDR5-4800")
    ]
    assert speeds[0] < speeds[1] < speeds[2]
    # 10 B parameters in 2.57 s on two sockets of six channels DDR4-2666 (arXiv 2101.06840, table 4).
    assert 10e9 / parse_host("2x Xeon 8168 12xDDR4-2666").rates()["cpu_adam"] == pytest.approx(2.57, rel=0.05)


def test_four_sticks_in_a_desktop_are_two_channels():
    two, four = (parse_host(f"Ryzen 9 7950X {n}xDDR5-5600") for n in (2, 4))
    assert four.bandwidth == two.bandwidth == pytest.approx(89.6e9)
    assert parse_host("Threadripper 7980X 4xDDR5-5200").channels == 4
    assert parse_host("EPYC 9354 12xDDR5-4800").channels == 12


def test_the_drive_of_a_description_sets_the_speed_of_files():
    slow, fast = (
        best("llama-3.2-1b", ON_NVME, host=f"7950X 2xDDR5-5600 nvme={rate}GB/s", batch=6)["clock"]["host"]
        for rate in (2, 7)
    )
    assert slow > 2 * fast


@pytest.mark.parametrize("words", ["7950X", "2xDDR5", "0xDDR5-5600", "7950X 2xDDR5-56"])
def test_a_host_without_channels_is_refused(words):
    with pytest.raises(InputError, match="--host"):
        parse_host(words)


def test_a_power_limit_slows_arithmetic_and_saves_energy():
    usual, limited = (best("llama-3.2-1b", power_limit=watts, batch=96) for watts in (None, "300W"))
    ratio = limited["tokens_per_second"] / usual["tokens_per_second"]
    assert (300 / 450) ** (1 / 3) * 0.99 < ratio < 0.99
    assert limited["kwh"] < usual["kwh"]
    assert find_gpu("4090").limited(600) == find_gpu("4090")  # more than its own: as it is
    with pytest.raises(InputError, match="150W"):
        machine_of("4090", power_limit="100W")
    with pytest.raises(InputError, match="power"):
        machine_of("4090", power_limit="much")


def test_peer_access_makes_collectives_faster():
    keys = ["strategy=zero3", "strategy.micro_batch=2"]
    without, having = (best("llama-3.2-1b", keys, p2p=p2p, batch=6) for p2p in (False, True))
    assert having["tokens_per_second"] > 1.1 * without["tokens_per_second"]


def test_cards_that_differ_are_planned_as_the_slowest_and_smallest():
    mixed = machine_of("2x4090,3060", links="x16,x8,x4")
    assert mixed.ranks == 3 and mixed.card is not None
    assert mixed.card.usable_bytes == find_gpu("3060").usable_bytes
    assert mixed.card.plain_flops == find_gpu("3060").plain_flops
    assert mixed.with_ranks(2).card == find_gpu("4090") == mixed.widest(1).card
    assert machine_of("3060,2x4090", links="x4,x16,x8").widest(1).lanes == (16,)
    found = plan("qwen2.5-0.5b", [], gpus="2x4090,3060", host_ram="64GiB")
    assert any("the cards differ" in line for line in found["assumed"])
    assert any("use --gpus '2xRTX 4090'" in line for line in found["notes"])
    assert len(parse_gpus("4090 + 3x3090")) == 4


def test_a_disk_that_is_too_small_is_refused_with_what_would_fit():
    asked = {"gpus": "3x4090", "host_ram": "256GiB"}
    need = plan("deepseek-llm-7b", [], **asked)["strategies"][0]["disk_bytes"]
    small = plan("deepseek-llm-7b", [], **asked, disk=need - 2**30)
    assert not small["strategies"] and "of disk" in small["refused"][0]["why"][0]
    way = small["ways_out"][0]
    assert plan("deepseek-llm-7b", way["keys"], **{**asked, "disk": need - 2**30, **way["options"]})["strategies"]
    tiny = plan("deepseek-llm-7b", [], **asked, disk="20GiB")
    way = tiny["ways_out"][0]
    assert "disk" in way["options"]
    assert plan("deepseek-llm-7b", way["keys"], **{**asked, **way["options"]})["strategies"]


def test_a_card_without_bf16_names_the_format_that_it_has():
    refused = plan("qwen2.5-0.5b", [], gpus="V100 SXM 32GB")
    assert not refused["strategies"] and "use fp16" in refused["refused"][0]["why"][0]
    fits = plan("qwen2.5-0.5b", ["train.precision=fp16"], gpus="Tesla V100-SXM2-32GB")["strategies"]
    a100 = plan("qwen2.5-0.5b", ["train.precision=fp16"], gpus="A100 SXM 40GB")["strategies"]
    assert 0 < fits[0]["tokens_per_second"] < a100[0]["tokens_per_second"]
