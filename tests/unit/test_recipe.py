"""Recipes: order of defaults, file and command line; numbers by declared type; lines in errors; words into sections."""

from __future__ import annotations

from itertools import permutations

import pytest
import yaml

from tercet.errors import InputError
from tercet.spec.recipe import build_recipe, find_recipe, load_recipe
from tercet.units import parse_bytes, parse_count, parse_token_length, show_bytes, show_seconds


def build(*overrides: str, **tree):
    return build_recipe({"data": {"train": "x.txt"}, **tree}, overrides)


def test_defaults_then_file_then_command_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {train: x.txt}\noptim: {lr: 1e-4, weight_decay: 0.2}\n")
    recipe = load_recipe(path, ["optim.lr=5e-5"])
    assert (recipe.name, recipe.optim.lr, recipe.optim.weight_decay, recipe.optim.clip) == ("mine", 5e-5, 0.2, 1.0)


@pytest.mark.parametrize("where", ["file", "command line"])
def test_numbers_are_read_by_the_declared_type(tmp_path, where):
    keys = {"optim.lr": "1e-4", "train.steps": "1_000", "data.sequence_tokens": "4k", "train.batch_sequences": "2k"}
    if where == "file":
        path = tmp_path / "r.yaml"
        path.write_text(
            "optim: {lr: 1e-4}\ntrain: {steps: 1_000, batch_sequences: 2k}\ndata: {train: x, sequence_tokens: 4k}\n"
        )
        recipe = load_recipe(path)
    else:
        recipe = build(*(f"{k}={v}" for k, v in keys.items()))
    assert recipe.optim.lr == 1e-4
    assert recipe.train.steps == 1000
    assert recipe.data.sequence_tokens == 4096  # a length in tokens: k is 1 024, as in "a 4k context"
    assert recipe.train.batch_sequences == 2000


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "24GB", 24 * 10**9),
        (parse_bytes, "24GiB", 24 * 2**30),
        (parse_bytes, "512", 512),
        (parse_count, "1.5B", 1_500_000_000),
        (parse_count, "64Ki", 65536),
        (parse_token_length, "8k", 8192),
    ],
)
def test_units(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_bytes, "24 parsecs"), (parse_count, "1.5"), (parse_count, "4 GBB")],
)
def test_bad_units_show_the_value(parse, text):
    with pytest.raises(ValueError, match=text.split()[0]):
        parse(text)


def test_units_are_shown_short():
    assert show_bytes(21_400_000_000) == "19.9 GiB"
    assert show_seconds(7500) == "2 h 5 min"


def test_words_expand_before_overrides_apply():
    recipe = build("strategy.micro_batch=4", strategy="zero2")
    assert (recipe.strategy.zero, recipe.strategy.micro_batch) == (2, 4)
    recipe = build("model.layers=2", model="first-light")
    assert (recipe.model.preset, recipe.model.layers) == ("first-light", 2)
    recipe = build("data.train=[{path: a.jsonl, weight: 2}, b.txt]", "data.validation=0.1", "optim.clip=none")
    assert [(s.path, s.weight) for s in recipe.data.train] == [("a.jsonl", 2.0), ("b.txt", None)]
    assert recipe.data.validation == 0.1
    assert recipe.optim.clip == "none"
    assert build("strategy=single").strategy.data == 1


def test_a_list_and_its_parts_mean_the_same_in_either_order():
    """A part that was given first would be lost when the list takes its place."""
    parts = ["data.train.0.map={text: body}", "data.train.0.weight=2", "data.train=[{path: a.jsonl}, b.txt]"]
    for order in permutations(parts):
        assert [(s.path, s.weight, s.map) for s in build(*order).data.train] == [
            ("a.jsonl", 2.0, {"text": "body"}),
            ("b.txt", None, {}),
        ]


def test_the_resolved_recipe_reads_back_as_itself():
    recipe = build("model=first-light", "strategy=zero3", "optim.betas=[0.9, 0.99]", "data.validation=v.jsonl")
    path_free = yaml.safe_load(recipe.to_yaml())
    assert path_free["strategy"]["zero"] == 3
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.yaml"
        file.write_text(recipe.to_yaml(), encoding="utf-8")
        assert load_recipe(file) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: x}\noptim: {lr: fast}\n", r"line 2: optim\.lr is 'fast'; it must be a number"),
        ("data: {train: x}\ntrain:\n  steps: 0\n", r"line 3: train\.steps is 0; it must be at least 1"),
        ("data: {train: x}\ntrain: {steps: 5, epochs: 1}\n", "give one of the two"),
        ("data: {train: x\n", "line 2, column 1: not valid YAML"),
        ("data: {train: x}\ndata: {train: y}\n", "line 2: data is given twice"),
        ("optim: {lr: 1}\n", "data is missing"),
        ("data: {train: x}\nstrategy: zero9\n", r"line 2: strategy: 'zero9' is not a strategy; did you mean zero"),
        ("- a\n- b\n", "a recipe is a mapping of sections"),
    ],
)
def test_errors_name_file_line_value_and_what_is_allowed(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2
    assert "r.yaml" in str(caught.value) or "data" in str(caught.value)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(InputError, match="did you mean first-light"):
        find_recipe("first-ligth")


def test_a_recipe_that_is_not_utf8(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"data: {train: \xc0}\n")
    with pytest.raises(InputError, match="byte 14 is not UTF-8"):
        load_recipe(path)
