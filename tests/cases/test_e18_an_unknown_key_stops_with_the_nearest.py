"""E18: a misspelt or misplaced key is an error with the right section; the resolved recipe is saved (tests/e2e)."""

from __future__ import annotations

import pytest

from tercet.errors import InputError
from tercet.spec.recipe import build_recipe, load_recipe


def tree():
    return {"data": {"train": "x.txt"}}


@pytest.mark.parametrize(
    ("override", "proposal"),
    [
        ("optim.learning_rte=1e-4", "optim.lr"),
        ("learning_rate=1e-4", "optim.lr"),
        ("train.lr=1e-4", "optim.lr"),  # the wrong section
        ("train.batch-sequences=4", "train.batch_sequences"),  # hyphen for underscore
        ("strategy.recompute_=full", "strategy.recompute"),
        ("data.sequence_token=8", "data.sequence_tokens"),
        ("trian.steps=3", "train"),
        ("model.hidden_size=64", "model.width"),
    ],
)
def test_on_the_command_line(override, proposal):
    with pytest.raises(InputError) as caught:
        build_recipe(tree(), [override])
    assert caught.value.exit_code == 2
    assert "unknown key" in str(caught.value)
    assert proposal in str(caught.value)
    assert repr(override) in str(caught.value)


def test_in_a_file_with_its_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data:\n  train: x.txt\noptim:\n  learning-rate: 1\n")
    with pytest.raises(InputError, match=r"r\.yaml, line 4: unknown key optim\.learning-rate; did you mean optim\.lr"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("optim.lr=-1", "greater than 0 and at most 10"),
        ("strategy.zero=4", "at least 0 and at most 3"),
        ("data.validation=1.5", "greater than 0 and less than 1"),
        ("train.precision=bf17", "bf16, fp32"),
        ("train.steps=2.5", "whole"),
    ],
)
def test_out_of_range_names_the_range(override, allowed):
    with pytest.raises(InputError) as caught:
        build_recipe(tree(), [override])
    assert allowed in str(caught.value)


def test_a_command_exits_with_2(cli):
    done = cli.run("train", "small.yaml", "learning_rte=1", code=2)
    assert "optim.lr" in done.stderr
    assert not (cli.folder / "runs").exists()
