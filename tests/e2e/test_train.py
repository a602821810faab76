"""tercet train as a whole: files, equality of layouts, loading by transformers, resuming a finished run."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import yaml


def test_the_run_folder_is_complete(finished):
    cli, run = finished
    folder = cli.folder / run
    for name in (
        "recipe.yaml",
        "plan.json",
        "events.jsonl",
        "summary.json",
        "report.html",
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "logs/rank-2.log",
        "checkpoints/step-000030/manifest.json",
    ):
        assert (folder / name).is_file(), name
    assert not (folder / "run.lock").exists()
    assert list((folder / "tensorboard").iterdir())
    summary = json.loads((folder / "summary.json").read_text())
    steps = cli.events(run, "step")
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert summary["steps"] == 30
    assert summary["tokens"] == sum(row["tokens"] for row in steps)
    assert len(summary["peak_bytes_per_rank"]) == 3
    assert summary["train_loss"] == steps[-1]["loss"] < steps[0]["loss"]
    assert summary["validation_loss"] == cli.events(run, "evaluate")[-1]["validation_loss"]
    assert [row["step"] for row in cli.events(run, "evaluate")] == [15, 30]
    assert cli.events(run, "sample")[-1]["prompt"] == "The for statement"
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["optim"]["lr"] == 1e-3
    assert recipe["optim"]["betas"] == [0.9, 0.95]


@pytest.mark.slow  # tests/distributed has it without a command line
def test_sharded_ranks_print_the_losses_of_one(cli):
    """tests/distributed holds every strategy to this; here the whole path of two, from the command line."""
    common = ("train.steps=6", "output.checkpoint_every=0", "train.sample_prompts=[]")
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "one", *common)
    cli.run("train", "small.yaml", "strategy=zero3", "--ranks", "2", "--output", "two", *common)
    assert cli.losses("two") == pytest.approx(cli.losses("one"), rel=1e-4)


def test_transformers_loads_the_model_with_equal_logits(finished):
    import transformers

    import tercet

    cli, run = finished
    theirs = transformers.AutoModelForCausalLM.from_pretrained(cli.folder / run / "model").eval()
    ours = tercet.load_model(cli.folder / run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cli.folder / run / "model")
    ids = torch.tensor([tokenizer("The for statement is used to iterate", add_special_tokens=False)["input_ids"]])
    logits = ours(ids)
    assert logits.shape == (1, ids.shape[1], 300)
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    prompt = torch.tensor([tokenizer("The for statement")["input_ids"]])
    expected = theirs.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :].tolist()
    answer = json.loads(cli.run("generate", run, "The for statement", "--tokens", "6", "--json").stdout)
    assert answer["tokens"] == expected


def test_the_end_lays_predicted_beside_measured(finished):
    from tercet.report.compare import compare

    cli, run = finished
    text = (cli.folder / "output.txt").read_text()
    rows = {line.split("  ")[1].strip(): line for line in text.splitlines() if line.startswith("  ")}
    plan, summary = (json.loads((cli.folder / run / f"{name}.json").read_text()) for name in ("plan", "summary"))
    for row in compare(plan, summary):
        if row["group"] == "at the peak" and row["what"] in ("weights", "gradients", "optimizer"):
            assert row["error"] == 0
            assert "exact" in rows[row["what"]]
    assert "resident at the peak" in rows
    assert "unknown" in rows["tokens per second"]  # nobody has measured this machine: not invented


def test_resuming_a_finished_run_says_so(finished):
    cli, run = finished
    before = cli.weights(run)
    process = cli.run("train", "--resume", run)
    assert "finished" in process.stderr
    assert cli.weights(run) == before


def test_an_existing_run_is_not_overwritten(finished):
    cli, run = finished
    process = cli.run("train", "small.yaml", "--output", run, code=2)
    assert "--resume" in process.stderr


@pytest.mark.slow
def test_started_by_torchrun(cli):
    cli.environment["PYTHONPATH"] = ""
    import subprocess

    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "tercet",
            "train",
            "small.yaml",
            "train.steps=4",
            "output.folder=run",
        ],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(cli.losses("run")) == 4
    assert json.loads((cli.folder / "run" / "summary.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(cli):
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=4", "optim.schedule=constant")
    process = cli.run("train", "--resume", "run", "train.steps=6")
    assert "train.steps: 4 -> 6" in process.stderr
    assert len(cli.losses("run")) == 6
    process = cli.run("train", "--resume", "run", "train.batch_sequences=6", "train.steps=8", code=2)
    assert "train.batch_sequences" in process.stderr
