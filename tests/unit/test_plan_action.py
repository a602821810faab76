"""tercet plan ends with what to do: every printed name and line is read back as the strategy that was planned."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.planner.answer import choose, plan
from tercet.planner.command import strategy_keys, train_command
from tercet.planner.table import show
from tercet.planner.ways import hint_for_train
from tercet.spec.machine import machine_of
from tercet.spec.recipe import StrategySection, load_recipe
from tercet.spec.strategy import Strategy, Work, resolve
from tercet.training.preflight import require_base

CASES = [
    ("deepseek-llm-7b", [], {"gpus": "3x4090", "host_ram": "192GB"}),
    ("llama-1.2b-32k", [], {"gpus": "3x4090"}),
    ("llama-1.2b-32k", ["strategy.compile=true"], {"gpus": "2x3090", "host_ram": "64GB"}),
    ("smollm2-135m", ["train.precision=fp32"], {"gpus": "1x4090", "batch": "20", "sequence": "1k"}),
    ("deepseek-v2-lite", [], {"gpus": "3x4090", "host_ram": "384GB"}),
    ("first-light", ["strategy=zero3", "strategy.reduce_gradients=once_per_step"], {"gpus": "2x4090"}),
    (
        "three-4090-deepseek-7b-zero2-offload",
        ["strategy.zero=3", "strategy.offload.optimizer=nvme"],
        {"gpus": "3x4090"},
    ),
    ("three-4090-llama-1.2b-zero3", [], {"gpus": "3x4090"}),
    ("first-light", ["train.steps=7"], {}),
]


def as_run(line: str) -> tuple[str, list[str], int]:
    """Return (recipe, overrides, ranks) of a printed line."""
    words = shlex.split(line)
    assert words[:2] == ["tercet", "train"] and words[-2] == "--ranks"
    return words[2], words[3:-2], int(words[-1])


@pytest.mark.parametrize(("name", "overrides", "machine"), CASES)
def test_every_name_and_the_line_are_read_back_as_the_same_strategy(name, overrides, machine):
    answer = plan(name, overrides, **machine)
    assert answer["strategies"]
    here = machine_of(machine.get("gpus"), machine.get("host_ram"))
    for entry in [*answer["strategies"], *answer["refused"]]:
        wanted = Strategy(**entry["strategy"])
        section = StrategySection.model_validate(entry["name"])
        assert replace(resolve(section, wanted.ranks, Work(64, 960)), micro_batch=1) == replace(wanted, micro_batch=1)
    for n in range(len(answer["strategies"])):
        line = train_command(name, overrides, {**answer, "strategies": answer["strategies"][n:]})
        recipe, keys, ranks = as_run(line)
        loaded = load_recipe(recipe, keys)
        strategy, _ = choose(loaded, here, ranks)
        assert strategy == Strategy(**answer["strategies"][n]["strategy"]), line
        assert Work.of(loaded).batch_sequences == answer["work"]["batch_sequences"]
        assert Work.of(loaded).sequence_tokens == answer["work"]["sequence_tokens"]


def test_every_strategy_has_a_word_that_is_read_back():
    places = product(("native", "deepspeed"), range(4), ("none", "selective", "full"), ("none", "cpu"), (False, True))
    for engine, zero, recompute, place, compiled in places:
        strategy = Strategy(
            engine=engine,
            zero=zero,
            ranks=3,
            micro_batch=2,
            recompute=recompute,
            offload_optimizer=place,
            offload_weights=place,
            compile=compiled,
            tensor=3 if zero == 1 else 1,
            reduce_gradients="every_micro_batch" if zero >= 2 else "once_per_step",
        )
        tree: dict[str, object] = {}
        for key in strategy_keys(strategy):
            name, _, value = key.partition("=")
            tree = (
                StrategySection.model_validate(value).model_dump()
                if name == "strategy"
                else {**tree, name.removeprefix("strategy."): value}
            )
        assert resolve(StrategySection.model_validate(tree), 3, Work(64, 96)) == strategy


def test_a_strategy_that_is_none_is_refused_with_what_would_be():
    with pytest.raises(ValueError, match="zero3"):
        StrategySection.model_validate("zero4")
    with pytest.raises(ValueError, match="selective"):
        StrategySection.model_validate("zero3+selectiv")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize(("name", "overrides", "machine"), CASES)
def test_nothing_but_the_command_is_wider_than_the_terminal(name, overrides, machine, width, details):
    answer = plan(name, overrides, **machine)
    answer["train"] = train_command(name, overrides, answer)
    text = show(answer, width=width, details=details)
    lines = text.splitlines()
    assert lines[0].startswith("FITS") and lines[-1] == answer["train"] in lines[2:5]
    long = [line for line in lines if len(line) > width and line != answer["train"]]
    assert not long


def test_what_does_not_fit_says_so_first_and_names_a_way_out():
    done = CliRunner().invoke(app, ["plan", "deepseek-llm-7b", "--gpus", "3x4090", "strategy=zero3"])
    assert done.exit_code == 3
    lines = done.output.splitlines()
    assert lines[0] == "DOES NOT FIT: deepseek-llm-7b on 3x RTX 4090"
    assert "Way out: " in "\n".join(lines[1:4])


def test_it_times_this_run(tmp_path, monkeypatch):
    """By its steps; by its epochs and the text's bytes; by its rows when they are prepared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.jsonl").write_text('{"text": "a b c d e f g h"}\n' * 800)
    (tmp_path / "mine.yaml").write_text(
        "model: {layers: 2, width: 32, heads: 2, ffn: 64, vocabulary: 300}\n"
        "data: {train: text.jsonl, sequence_tokens: 64}\ntrain: {batch_sequences: 6, epochs: 2}\n"
    )

    def said(*more: str) -> str:
        done = CliRunner().invoke(app, ["plan", "mine.yaml", "--gpus", "3x4090", *more])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.partition("\n\n")[0].split())

    assert ", 40 steps: " in said("--steps", "40")
    estimated = int(re.search(r"2 epochs, about (\d+) steps", said())[1])
    assert estimated == pytest.approx(2 * 800 * 28 / 4 / 64 / 6, abs=1)

    from tercet.data.prepare import prepare

    recipe = load_recipe("mine.yaml")
    found = prepare(recipe.data, vocabulary=300, model_tokenizer=None, seed=0)
    steps = -(-2 * found.train.rows_per_epoch // 6)
    assert f"2 epochs, {steps} steps: " in said()


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("smollm2-135m", "random (preset smollm2-135m)"),
        ("deepseek-ai/DeepSeek-V2-Lite", "pretrained from deepseek-ai/DeepSeek-V2-Lite"),
    ],
)
def test_it_says_what_the_weights_start_from(model, weights):
    done = CliRunner().invoke(app, ["plan", model, "--gpus", "8xH100 SXM 80GB"])
    assert f"weights: {weights}" in re.sub(r"\s+", " ", done.output)


def test_a_model_without_a_tokenizer_gets_one_of_its_own_and_a_folder_keeps_its_own(tmp_path):
    (tmp_path / "a.yaml").write_text("model: smollm2-135m\ndata: {train: x.jsonl}\n")
    assert load_recipe(tmp_path / "a.yaml").data.tokenizer == "train"
    assert load_recipe(tmp_path / "a.yaml", ["data.tokenizer=gpt2"]).data.tokenizer == "gpt2"
    assert load_recipe(tmp_path / "a.yaml", [f"model={tmp_path}"]).data.tokenizer == "model"
    assert load_recipe(tmp_path / "a.yaml", ["model=owner/name"]).data.tokenizer == "model"
    assert load_recipe(tmp_path / "a.yaml", ["data.tokenizer=model"]).data.tokenizer == "model"


@pytest.mark.parametrize(
    ("name", "starts", "model"),
    [
        ("llama-3.2-1b", "pretrained from meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("llama-1.2b-32k", "random (preset llama-1.2b-32k)", "FOLDER"),  # sizes of nobody's weights
        ("first-light", "random (preset first-light)", "FOLDER"),
    ],
)
def test_an_adapter_is_planned_on_weights_that_training_accepts(name, starts, model, tmp_path):
    answer = plan(name, [], gpus="1x4090", method="lora")
    assert answer["weights"] == starts
    line = train_command(name, ["adapter.kind=lora"], answer)
    recipe, keys, _ = as_run(line)
    assert f"model={model}" in keys
    there = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    require_base(load_recipe(recipe, there))  # what tercet train asks
    assert any("FOLDER" in note for note in answer["notes"]) == (model == "FOLDER")


@pytest.mark.parametrize("key", ["strategy.tensor=3", "train.precision=fp8"])
def test_what_is_not_built_is_not_called_too_large(key):
    done = CliRunner().invoke(app, ["plan", "first-light", "--gpus", "3x4090", key])
    assert done.exit_code == 3
    first, why = done.output.splitlines()[:2]
    assert first == "CANNOT RUN: first-light on 3x RTX 4090"
    assert key.partition("=")[0] in why and "not built yet" in why
    assert "smaller model" not in done.output


@pytest.mark.parametrize("keys", [["data.train=nowhere.txt"], ["model.vocabulary=200"]])
def test_what_train_would_refuse_is_said_by_the_plan(keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = CliRunner().invoke(app, ["plan", "first-light", *keys, "--gpus", "1x4090", "--json"])
    (why,) = json.loads(planned.stdout)["train_refuses"]
    trained = CliRunner().invoke(app, ["train", "first-light", *keys, "--ranks", "1"])
    assert isinstance(trained.exception, InputError) and trained.exception.message == why
    assert json.loads(CliRunner().invoke(app, ["plan", "first-light", "--json"]).stdout)["train_refuses"] == []


def test_train_is_offered_keys_that_it_takes_and_otherwise_the_machine_to_plan():
    """An option of `tercet plan` is none of `tercet train`."""
    for name, keys, machine in (
        ("three-4090-deepseek-7b-full", ["data.sequence_tokens=4096"], {"gpus": "1x4090", "host_ram": "32GB"}),
        ("first-light", ["data.sequence_tokens=400000"], {"gpus": "1x4090", "host_ram": "64GB"}),
    ):
        ways = plan(name, keys, **machine)["ways_out"]
        assert ways
        for way in ways:
            said = way["for_train"]
            on_another = any(way["options"].get(k) for k in ("host_ram", "gpus"))
            assert on_another == said.startswith("on a machine with ") and on_another == ("--" in said), said
            if not on_another:
                taken = [word for word in said.split("(")[0].split() if "=" in word]
                assert plan(name, [*keys, *taken], **machine)["strategies"], said


def test_a_way_that_takes_longer_than_a_year_is_said_last():
    ways = plan("deepseek-llm-67b", [], gpus="1x4090", host_ram="32GB")["ways_out"]
    years = [1e9 / float(re.search(r"([\d ]+) tokens/s", w["says"])[1].replace(" ", "")) / (365 * 86400) for w in ways]
    assert [year > 1 for year in years] == [way["slow"] for way in ways] == [False, True]
    assert hint_for_train(ways).endswith("(a run of more than a year).")
    assert "No way out within a year" in show(
        {**plan("deepseek-llm-67b", [], gpus="1x4090"), "strategies": [], "ways_out": ways[1:]}
    )
