"""G37: doctor measures a card that the table lacks and writes the entry that plan then uses."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.errors import InputError
from tercet.planner.answer import plan
from tercet.probe import processor
from tercet.probe.doctor import examine
from tercet.spec.machine import GIB, find_gpu, machine_file, this_machine
from tests.cases.test_g34_g35_g36_the_cards_that_may_be_used import card, smi  # noqa: F401

NAME = "NVIDIA GeForce RTX 9999"


@pytest.fixture
def doctor(smi, monkeypatch, tmp_path):  # noqa: F811
    """Return what examines a machine with one card, whose part the CPU plays: its real rates are measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processor, "devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(processor, "SECONDS", 0.01)
    for slow in ("cpu_adam", "disk_write", "matmul_fp8"):  # not the card's
        monkeypatch.setattr(processor, slow, lambda *anything: 1e9)
    matmul = processor.matmul  # many processors have no fp16 and take minutes for it
    monkeypatch.setattr(processor, "matmul", lambda d, t: matmul(d, torch.bfloat16 if t == torch.float16 else t))
    monkeypatch.setattr(processor, "host_copies", lambda cards: {"host_to_card": 2e10})

    def examined(name: str) -> list[str]:
        smi(card(0, name, 32768, 0))
        said: list[str] = []
        examine(1, False, said.append)
        return said

    return examined


def test_the_entry_is_written_with_its_source_and_used(smi, doctor):  # noqa: F811
    smi(card(0, NAME, 32768, 0))
    with pytest.raises(InputError, match="tercet doctor"):
        this_machine()
    assert any(NAME in text for text in doctor(NAME))
    block = json.loads(machine_file().read_text())["cards"][NAME]
    assert {"memory_gib", "bandwidth_gbps", "bf16", "fp16", "pcie_lanes", "watts"} <= block.keys()
    assert all(value[1] == "measured" for key, value in block.items() if key != "arch")
    assert block["memory_gib"][0] == 32 and block["bf16"][0] > 0
    here = this_machine()
    assert here.card.name == NAME and here.card.memory_bytes == 32 * GIB and here.measured["matmul_bf16"] > 0
    answer = plan("first-light")
    assert answer["machine"]["card"] == NAME and answer["strategies"][0]["tokens_per_second"]
    assert find_gpu("rtx 9999").flops["bf16"] == here.card.flops["bf16"]
    assert plan("first-light", gpus="2x RTX 9999")["strategies"]


def test_a_card_of_the_table_keeps_its_data_sheet(doctor):
    doctor("NVIDIA GeForce RTX 4090")
    assert json.loads(machine_file().read_text())["cards"] == {}


def test_doctor_does_not_take_the_cpus_rates_for_a_cards(smi, monkeypatch, tmp_path):  # noqa: F811
    smi(card(0, NAME))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processor, "devices", list)
    with pytest.raises(InputError, match="pip install"):
        examine(1, False, lambda text: None)
    assert not machine_file().exists()
