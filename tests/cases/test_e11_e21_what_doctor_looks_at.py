"""E11 and E21 (doctor): build tools, power, heat and slots are looked at, and each finding says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tercet.probe import inventory
from tercet.probe.inventory import build_tools, sensor_findings
from tercet.probe.machine_file import update
from tercet.spec.machine import read_machine_file, this_machine

TOOLS = {
    "compiler": "g++ 12",
    "ninja": "1.11",
    "cards": [{"name": "RTX 4090"}],
    "nvcc": "release 12.8",
    "cuda_home": "/usr/local/cuda",
    "libaio": True,
    "async_io_built": False,
}


def test_nothing_is_wrong_when_all_is_there():
    assert [f.level for f in build_tools(TOOLS)] == ["ok"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("compiler", "no C++ compiler"),
        ("ninja", "pip install ninja"),
        ("nvcc", "CUDA_HOME is /usr/local/cuda"),
    ],
)
def test_each_missing_tool_is_named_and_the_fallback_too(missing, words):
    (finding,) = build_tools({**TOOLS, missing: None})
    assert words in finding.what and "falls back to PyTorch's own fused AdamW" in finding.advice


def test_an_empty_environment_lists_all_causes(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # ninja from PyPI lies beside it
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    found = inventory.inventory(tmp_path)
    (finding,) = build_tools({**found, "cards": [{"name": "RTX 4090"}]})
    for words in ("no C++ compiler", "no ninja", "CUDA_HOME is not set"):
        assert words in finding.what


def row(**changes: str) -> dict[str, str]:
    return {
        "index": "0",
        "name": "RTX 4090",
        "temperature.gpu": "60",
        "power.draw": "300",
        "power.limit": "450",
        "clocks_throttle_reasons.active": "0x0000000000000000",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
    } | changes


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"temperature.gpu": "87"}, "warning", "87 °C"),
        ({"clocks_throttle_reasons.active": "0x0000000000000040"}, "warning", "heat"),
        ({"clocks_throttle_reasons.active": "0x0000000000000004"}, "note", "power cap"),
        ({"pcie.link.width.current": "4"}, "note", "4 of its 16 PCIe lanes"),
    ],
)
def test_sensors(change, level, words):
    (finding,) = sensor_findings([row(**change)])
    assert finding.level == level and words in finding.what


def test_a_calm_card_and_unreadable_sensors_say_nothing():
    assert sensor_findings([row()]) == []
    assert sensor_findings([row(**{"temperature.gpu": "[N/A]", "clocks_throttle_reasons.active": "[N/A]"})]) == []


def test_several_cards_at_full_power_get_advice():
    (finding,) = sensor_findings([row(index=str(n)) for n in range(3)])
    assert "1350 W" in finding.what and "nvidia-smi -pl" in finding.advice


def test_the_machine_file_is_merged_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = update(
        {
            "kind": "cpu",
            "measured": {"matmul_bf16": 1e12, "memory": 1e10, "nonsense": 3},
            "measured_at": "today",
        }
    )
    update({"collectives": {"fingerprint": "x", "environment": {}}})
    assert path == tmp_path / "tercet" / "machine.json"
    assert json.loads(Path(path).read_text())["measured"]["memory"] == 1e10
    assert read_machine_file()["collectives"]["fingerprint"] == "x"
    machine = this_machine(3)
    if machine.card is None:
        assert machine.measured == {"matmul_bf16": 1e12, "memory": 1e10} and machine.measured_at == "today"
