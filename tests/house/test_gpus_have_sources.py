"""Every number of gpus.toml names its source; a card that is not there stays unknown."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from tercet.errors import InputError
from tercet.spec.machine import find_gpu, gpus

TABLE = tomllib.loads((resources.files("tercet.spec") / "gpus.toml").read_text(encoding="utf-8"))
CARDS = [name for name in TABLE if name != "sources"]
NEEDED = {"memory_gib", "bandwidth_gbps", "fp16", "compute_capability", "peer_access"}


@pytest.mark.parametrize("card", CARDS)
def test_every_number_has_a_source(card):
    assert TABLE[card].keys() >= NEEDED
    assert "bf16" in TABLE[card] or TABLE[card]["compute_capability"][0] < 8.0, "only cards before Ampere lack bf16"
    for key, value in TABLE[card].items():
        if key in ("arch", "note"):
            continue
        assert isinstance(value, list) and value[-1] in TABLE["sources"], f"{card}: {key} = {value} names no source"
        assert all(isinstance(v, int | float) for v in value[:-1])


def test_every_source_is_used_and_says_where():
    used = {v[-1] for card in CARDS for v in TABLE[card].values() if isinstance(v, list)}
    assert used == TABLE["sources"].keys()
    assert all("." in text for text in TABLE["sources"].values())


def test_the_reference_cards_are_there():
    wanted = {
        "RTX 3060 12GB",
        "RTX 3090",
        "RTX 3090 Ti",
        "RTX 4060 Ti 16GB",
        "RTX 5060 Ti 16GB",
        "RTX 4080",
        "RTX 4090",
        "RTX 4090 48GB (modified)",
        "RTX 4070",
        "RTX 4070 Ti",
        "RTX 4080 SUPER",
        "RTX 4090 D",
        "RTX 5070",
        "RTX 5070 Ti",
        "RTX 5080",
        "RTX 5090",
        "RTX A6000",
        "RTX 6000 Ada",
        "L40S",
        "RTX PRO 6000 Blackwell",
        "A10G 24GB",
        "A100 PCIe 80GB",
        "A100 SXM 40GB",
        "A100 SXM 80GB",
        "H100 PCIe 80GB",
        "H100 SXM 80GB",
        "H200 SXM 141GB",
        "A800 SXM 80GB",
        "H800 SXM 80GB",
        "L4",
        "V100 SXM 32GB",
        "MI300X 192GB",
    }
    assert wanted <= set(CARDS)


def test_dense_rates_stand_in_the_right_order():
    for card in gpus().values():
        assert card.usable_bytes < card.memory_bytes
        assert card.plain_flops <= card.flops.get("fp8", card.plain_flops)


def test_unknown_is_never_guessed():
    with pytest.raises(InputError, match="RTX 9999"):
        find_gpu("RTX 9999")
    with pytest.raises(InputError, match="A100 SXM 40GB"):
        find_gpu("a100")  # three cards of that name differ in memory
    assert find_gpu("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert find_gpu("NVIDIA A100-SXM4-80GB").name == "A100 SXM 80GB"
    assert find_gpu("NVIDIA H100 80GB HBM3").name == "H100 SXM 80GB"
