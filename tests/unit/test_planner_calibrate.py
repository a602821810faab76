"""`tercet calibrate` finds in runs the constants that made them, keeps them for plan, and refuses runs it cannot use."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import orjson
import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.planner.answer import plan, predict
from tercet.planner.calibrate import of_run
from tercet.planner.constants import load
from tercet.spec import machine
from tercet.spec.recipe import build_recipe
from tercet.spec.strategy import Work, resolve

RATES = {
    "matmul_fp32": 2e11,
    "matmul_bf16": 4e11,
    "memory": 2e10,
    "all_reduce": 1e9,
    "all_gather": 5e8,
    "reduce_scatter": 5e8,
    "collective_latency": 3e-4,
    "cpu_adam": 1e9,
}
# What the machine of these tests "really" reaches.
TRUTH = {"cpu_share": 0.6, "cpu_process_bytes": 700e6}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "detect_gpus", list)
    path = tmp_path / "tercet" / "machine.json"
    path.parent.mkdir()
    path.write_bytes(orjson.dumps({"kind": "cpu", "measured": RATES, "measured_at": "2026-11-30 12:00"}))
    return path


def recipe_of(width: int, batch: int):
    tree = {
        "model": {
            "layers": "4",
            "width": str(width),
            "heads": "4",
            "ffn": str(3 * width),
            "vocabulary": "1024",
            "context_tokens": "512",
        },
        "data": {"train": "-", "sequence_tokens": "512"},
        "train": {"batch_sequences": str(batch), "steps": "50"},
        "strategy": {"micro_batch": "2"},
    }
    return build_recipe(tree)


def write_run(folder, width: int, batch: int, ranks: int, **summary):
    """A run folder whose figures are the planner's own under the constants TRUTH."""
    recipe = recipe_of(width, batch)
    strategy = resolve(recipe.strategy, ranks, Work.of(recipe))
    found = predict(recipe, strategy, replace(machine.this_machine(ranks), corrections=TRUTH))
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "plan.json").write_text(
        json.dumps({"ranks": ranks, "strategy": asdict(strategy), "machine": {"kind": "cpu", "card": None}})
    )
    measured = {
        "finished": True,
        "steps": 50,
        "device": "cpu",
        "tokens_per_second": found["tokens_per_second"] / 9,  # of chats: a ninth of the positions is trained
        "step_seconds": found["step_seconds"],
        "peak_bytes_per_rank": [sum(found["ledger"].values())] * ranks,
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(measured))
    return str(folder)


def test_the_constants_that_made_the_runs_are_found_and_used(here, tmp_path):
    folders = [
        write_run(tmp_path / f"run{n}", w, 12, r) for n, (w, r) in enumerate([(64, 1), (128, 2), (256, 3), (512, 3)])
    ]
    before = plan_speed()
    done = CliRunner().invoke(app, ["calibrate", *folders, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    for row in answer["runs"]:
        for figure in ("tokens_per_second", "memory_bytes"):
            assert row[figure]["after"] == pytest.approx(row[figure]["measured"], rel=0.05), row
            assert abs(row[figure]["before"] / row[figure]["measured"] - 1) > 0.1, row
    assert answer["corrections"]["cpu_share"] == pytest.approx(0.6, rel=0.1)
    assert plan_speed() == pytest.approx(0.6 * before, rel=0.15)
    described = plan("llama-3.2-1b", gpus="1x4090")["strategies"][0]["tokens_per_second"]
    printed = CliRunner().invoke(app, ["calibrate", *folders])
    assert printed.exit_code == 0 and "cpu_process_bytes: " in printed.output
    assert CliRunner().invoke(app, ["calibrate", "--forget"]).exit_code == 0
    assert plan_speed() == before
    assert plan("llama-3.2-1b", gpus="1x4090")["strategies"][0]["tokens_per_second"] == described, "another machine"


def plan_speed() -> float:
    return predict(
        recipe_of(128, 12),
        resolve(recipe_of(128, 12).strategy, 2, Work.of(recipe_of(128, 12))),
        machine.this_machine(2),
    )["tokens_per_second"]


def test_one_run_does_not_bend_what_it_says_nothing_about(here, tmp_path):
    done = CliRunner().invoke(app, ["calibrate", write_run(tmp_path / "run", 128, 12, 2), "--json"])
    moved = json.loads(done.stdout)["corrections"]
    assert not moved.keys() & {"reserve_share", "nf4_traffic", "staged_bus", "full_logits_bytes"}
    assert moved["cpu_share"] < 0.8 * load().cpu_share


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"finished": False}, "has not finished"),
        ({"steps": 3}, "has 3 steps; 5 are the fewest"),
    ],
)
def test_runs_that_cannot_be_timed_are_refused(here, tmp_path, change, why):
    folder = write_run(tmp_path / "run", 64, 12, 1, **change)
    with pytest.raises(InputError, match=why):
        of_run(folder, machine.this_machine())


def test_a_run_of_another_machine_is_refused(here, tmp_path):
    folder = write_run(tmp_path / "run", 64, 12, 1)
    content = json.loads((tmp_path / "run" / "plan.json").read_text())
    content["machine"] = {"kind": "gpu", "card": "RTX 4090"}
    (tmp_path / "run" / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="ran on RTX 4090, this is 1 CPU process"):
        of_run(folder, machine.this_machine())


def test_what_runs_on_cards_taught_is_not_used_on_the_cpu(here):
    content = orjson.loads(here.read_bytes())
    content["corrections"] = {"kind": "gpu", "runs": 1, "constants": {"cpu_share": 0.5}}
    here.write_bytes(orjson.dumps(content))
    assert machine.this_machine().corrections == {}
    content["corrections"]["kind"] = "cpu"
    here.write_bytes(orjson.dumps(content))
    assert machine.this_machine().corrections == {"cpu_share": 0.5}
