"""G61, E21: sensors are asked at intervals; heat and throttling are said and kept; a vanished card ends the run by name.

The stand-in for nvidia-smi answers the sensors' question only, so the run itself is one on the CPU.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from tercet.spec.run_folder import RunFolder
from tercet.training import cards
from tercet.training.cards import CardWatch

SMI = f"""#!{sys.executable}
import pathlib, sys
query = next((a for a in sys.argv if a.startswith("--query-gpu=index,")), None)
if query is None:
    sys.exit(9)
names = query.partition("=")[2].split(",")
state = pathlib.Path("state").read_text() if pathlib.Path("state").exists() else "calm"
for index in range(3):
    if state == "lost" and index == 1:
        print("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system.")
        continue
    row = dict(index=index, name="NVIDIA GeForce RTX 4090")
    row |= {{"temperature.gpu": 91 if state == "hot" and index == 2 else 60, "power.draw": 400, "power.limit": 450}}
    row |= {{"clocks.sm": 2500, "clocks.max.sm": 2700, "pci.bus_id": f"0000:0{{index + 1}}:00.0"}}
    row["clocks_throttle_reasons.active"] = "0x40" if state == "hot" and index == 2 else "0x0"
    row |= {{k: 16 for k in names if k.startswith("pcie")}}
    print(", ".join(str(row[n]) for n in names))
sys.exit(15 if state == "lost" else 0)
"""


@pytest.fixture
def smi(cli, monkeypatch):
    program = cli.folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    cli.environment["PATH"] = f"{program.parent}{os.pathsep}{cli.environment['PATH']}"
    hook = cli.folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\nif sys.orig_argv[1:3] == ['-m', 'tercet']:\n"
        "    import tercet.training.cards as m\n    m.CardWatch.__init__.__defaults__ = (0.2,)\n"
    )
    cli.environment["PYTHONPATH"] = str(hook)
    return cli


@pytest.mark.slow
def test_a_hot_card_is_said_and_a_vanished_one_ends_the_run(smi):
    cli = smi
    process = cli.start(
        "train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=100000", "optim.schedule=constant",
        "train.sample_prompts=[]", "output.checkpoint_every=100", "train.evaluate_every=0", "data.validation=none",
    )  # fmt: skip
    cli.wait_for_step("run", 1, process)
    (cli.folder / "state").write_text("hot")
    cli.wait_until(lambda: any(e["warnings"] for e in cli.events("run", "cards")), process)
    (cli.folder / "state").write_text("lost")
    ranks = cli.rank_processes("run")
    done = cli.finish(process, 1)
    assert not any(r.is_running() for r in ranks)
    assert done.stderr.count("card 2 (NVIDIA GeForce RTX 4090) is at 91 °C") == 1
    assert "slowed down by: heat (hardware)" in done.stderr
    last = done.stderr.strip().splitlines()
    assert "card 1 (NVIDIA GeForce RTX 4090) no longer answers" in last[-2] and "GPU is lost" in last[-2]
    assert "tercet train --resume" in last[-1]
    (lost,) = cli.events("run", "cards_lost")
    assert lost["cards"] == [1]
    look = cli.events("run", "cards")[0]["cards"][0]
    assert (look["celsius"], look["watts"], look["watts_limit"]) == (60, 400, 450)
    page = (cli.folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "no longer answers" in page and "up to 91 °C" in page


def watch(tmp_path, monkeypatch, answers):
    """Let a watch of two ranks see these answers, one a look; return it and what it said."""
    said: list[str] = []
    found = CardWatch(RunFolder(tmp_path), 2, said.append)
    first, *rest = answers
    found._known = {row["index"]: row for row in first[0]}
    for rows, complaint in rest:
        found._find_missing(rows, complaint)
    return found, said


def rows(*present):
    names = dict.fromkeys(cards.QUERY, "0")
    return [{**names, "index": str(n), "name": "RTX 4090", "pci.bus_id": f"0000:0{n + 1}:00.0"} for n in present]


def test_one_look_without_an_answer_is_not_a_lost_card(tmp_path, monkeypatch):
    found, said = watch(tmp_path, monkeypatch, [(rows(0, 1, 2), ""), ([], "timeout"), (rows(0, 1, 2), ""), ([], "")])
    assert found.lost is None and said == []


def test_a_card_missed_twice_but_not_in_a_row_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    whole, short = (rows(0, 1, 2), ""), (rows(0, 2), "")
    named = ([], "Unable to determine the device handle for GPU 0000:02:00.0")
    for missed in (short, named):
        found, said = watch(tmp_path, monkeypatch, [whole, missed, whole, missed, whole, missed])
        assert found.lost is None and said == [] and not (tmp_path / "events.jsonl").exists()
    found, _ = watch(tmp_path, monkeypatch, [whole, short, whole, short, short])
    assert found.lost is not None and "card 1" in found.lost


def test_a_card_that_the_run_does_not_use_does_not_end_it(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, said = watch(tmp_path, monkeypatch, [(rows(0, 1, 2), ""), (rows(0, 1), ""), (rows(0, 1), "")])
    assert found.lost is None and "card 2" in said[0] and "does not use it" in said[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    found, said = watch(tmp_path, monkeypatch, [(rows(0, 1, 2), ""), (rows(0, 1), ""), (rows(0, 1), "")])
    assert found.lost is not None and "card 2" in found.lost


def test_a_driver_that_names_the_lost_card_and_no_other(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gone = ([], "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.")
    found, _ = watch(tmp_path, monkeypatch, [(rows(0, 1, 2), ""), gone, gone])
    assert found.lost is not None and "card 1 (RTX 4090)" in found.lost and "card 0" not in found.lost
    assert json.loads((tmp_path / "events.jsonl").read_text())["cards"] == [1]
