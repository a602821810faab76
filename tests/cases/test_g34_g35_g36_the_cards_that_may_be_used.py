"""G34, G35, G36: the cards that may be used, each by its own free memory, and a PyTorch that can use them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tercet.errors import InputError, TercetError
from tercet.probe.selftest import Verdict, find_working_environment, run_check
from tercet.spec.cards import detect_gpus
from tercet.spec.machine import GIB, find_gpu, this_machine
from tercet.training.preflight import require_planned_device, require_torch_with_cards

SMI = """#!{python}
import json, sys
cards, slices = json.loads({cards!r}), {slices!r}
asked = next((a for a in sys.argv if a.startswith("--query-gpu=")), None)
if asked:
    for card in cards:
        print(", ".join(str(card.get(f, "[N/A]")) for f in asked.partition("=")[2].split(",")))
elif "-L" in sys.argv:
    print(slices)
"""


def card(index: int, name: str = "NVIDIA GeForce RTX 4090", total: int = 24564, used: int = 1, **more) -> dict:
    return {
        "index": index,
        "uuid": f"GPU-{index}{index}aa-{index}",
        "name": name,
        "memory.total": total,
        "memory.used": used,
        "pcie.link.gen.max": 4,
        "pcie.link.width.current": 16,
        "driver_version": "570.00",
        "power.limit": "450.00",
        **more,
    }


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return what lays a stand-in for nvidia-smi into PATH."""
    import sys

    def lay(*cards: dict, slices: str = "") -> Path:
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SMI.format(python=sys.executable, cards=json.dumps(cards), slices=slices))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path.parent

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lay


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ("0,1", [0, 1]),
        ("2", [2]),
        (" 2 , 0 ", [2, 0]),
        ("GPU-11", [1]),
        ("GPU-22aa-2,GPU-00aa-0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),
        ("0,7,2", [0]),
        ("1,1", []),
        ("NoDevFiles", []),
    ],
)
def test_g34_only_visible_cards_are_planned(smi, monkeypatch, wanted, seen):
    smi(*map(card, range(3)))
    assert [row["index"] for row in detect_gpus()] == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [int(row["index"]) for row in detect_gpus()] == seen
    machine = this_machine()
    if seen:
        assert machine.ranks == len(seen) and machine.card.name == "RTX 4090"
    else:
        assert machine.card is None and any("3 cards" in note for note in machine.notes)


def test_g34_a_slice_of_a_card_is_known_by_its_own_name_and_memory(smi, monkeypatch):
    listing = (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-00aa-0)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-aaaa)\n  MIG 1g.10gb     Device  1: (UUID: MIG-bbbb)"
    )
    smi(card(0, "NVIDIA A100-SXM4-80GB", 81920), slices=listing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    (row,) = detect_gpus()
    assert row["memory.total"] == "10240" and "1g.10gb" in row["name"]
    with pytest.raises(InputError, match="tercet doctor"):  # a slice has not the rates of the whole card
        this_machine()


def test_g34_a_selftest_that_cannot_begin_shows_its_own_error(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('libcudart.so: cannot open')")
    verdict = run_check(3, 20.0, {}, entry=(str(broken),))
    assert verdict.kind == "start" and "libcudart.so: cannot open" in verdict.says
    tried = []

    def attempt(variables: dict[str, str]) -> Verdict:
        tried.append(variables)
        return verdict

    with pytest.raises(TercetError, match=r"could not begin[\s\S]*libcudart"):
        find_working_environment(attempt)
    assert tried == [{}]  # no repair of collectives is tried for it


@pytest.mark.parametrize(
    ("name", "mib", "kind", "low", "high"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX 4060 Ti 16GB", 7.7, 8.0),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX 4060 Ti 16GB", 15.4, 16.0),
        ("NVIDIA GeForce RTX 4090", 49140, "RTX 4090 48GB (modified)", 46.5, 48.0),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090", 23.4, 23.7),
        ("NVIDIA GeForce RTX 3060", 12288, "RTX 3060 12GB", 11.5, 12.0),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100 SXM 40GB", 38.5, 40.0),
    ],
)
def test_g35_memory_is_the_cards_own(smi, name, mib, kind, low, high):
    smi(card(0, name, mib, 0))
    found = this_machine().card
    assert found.name == kind and low <= found.usable_bytes / GIB <= high
    assert found.memory_bytes == mib * 2**20


def test_g35_a_relative_by_name_is_not_taken_for_the_card(smi):
    smi(card(0, "NVIDIA GeForce RTX 4060", 8188))
    with pytest.raises(InputError, match="no data for this machine's card"):
        this_machine()


def test_g35_what_others_hold_is_said_and_taken_off(smi):
    smi(card(0, used=0), card(1, used=5120))
    machine = this_machine()
    free = this_machine(1)
    assert machine.card.usable_bytes == free.card.usable_bytes - 5120 * 2**20
    assert "card 1" in machine.notes[0] and "5.0" in machine.notes[0]
    assert free.notes == ()


def test_g35_mixed_cards_plan_by_the_smallest_and_say_so(smi):
    smi(card(0), card(1, "NVIDIA GeForce RTX 3060", 12288))
    machine = this_machine()
    small = find_gpu("RTX 3060 12GB")
    assert machine.card.flops["bf16"] == small.flops["bf16"] and machine.card.usable_bytes < 12 * GIB
    assert machine.card.bandwidth == small.bandwidth and "fp8" not in machine.card.flops
    assert "RTX 4090" in machine.notes[-1] and "RTX 3060" in machine.notes[-1]


@pytest.mark.slow
def test_g36_a_pytorch_without_cards_is_refused_and_the_cpu_is_a_word_away(smi, cli):
    place = smi(card(0), card(1))
    fake = cli.folder / "site" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: str | None = None\nhip: str | None = None\n")
    cli.environment |= {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(fake.parent)}
    done = cli.run("train", "small.yaml", "--output", "run", code=2)
    assert "pip install" in done.stderr and "--cpu" in done.stderr and "RTX 4090" in done.stderr
    assert not (cli.folder / "run").exists()
    del cli.environment["PYTHONPATH"]
    cli.run("train", "small.yaml", "--output", "run", "--cpu", "--ranks", "1", "train.steps=2")
    assert json.loads((cli.folder / "run" / "plan.json").read_text())["machine"]["kind"] == "cpu"


def test_g36_a_rank_that_got_no_card_does_not_train_on_the_cpu_in_silence():
    with pytest.raises(InputError, match="finds none"):
        require_planned_device({"machine": {"kind": "gpu", "card": "RTX 4090"}}, "cpu")
    require_planned_device({"machine": {"kind": "cpu"}}, "cpu")
    require_planned_device({}, "cpu")


@pytest.mark.parametrize(("line", "refused"), [("cuda: str = '12.8'", False), ("cuda: str | None = None", True)])
def test_g36_the_version_file_decides(tmp_path, monkeypatch, line, refused):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(f"{line}\nhip: str | None = None\n")
    from importlib.util import spec_from_file_location

    found = spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    if refused:
        with pytest.raises(InputError, match="CPU alone"):
            require_torch_with_cards("RTX 4090")
    else:
        require_torch_with_cards("RTX 4090")
