"""What a stranger meets between `init` and the first run of their own: each word leads to what works."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import load_recipe
from tercet.spec.recipe.loading import build_recipe


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert getattr(done.exception, "exit_code", done.exit_code) == 2, done.output
    return str(done.exception)


def test_prepare_of_what_is_not_here_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-chats.jsonl").write_text("{}\n")
    (tmp_path / "sub").mkdir()
    for name in ("nothere.jsonl", "sub/nothere.csv", "nothere"):
        assert f"no file, folder or recipe '{name}'" in refused("prepare", name, "--model", "smollm2-135m")
    assert "did you mean my-chats.jsonl" in refused("prepare", "my-chat.jsonl")
    assert "did you mean first-light" in refused("prepare", "first-ligth")
    assert "nothing matches 'x*.jsonl'" in refused("prepare", "x*.jsonl")


@pytest.mark.parametrize(("width", "heads"), [(385, 6), (385, 5), (384, 7), (7, 4), (30, 4), (6, 2), (100, 8)])
def test_every_size_that_is_named_builds(width, heads):
    sizes = {"layers": 1, "ffn": 8, "vocabulary": 300, "context_tokens": 64}

    def model(width: int, heads: int):
        said = {"model": {**sizes, "width": width, "heads": heads}, "data": {"train": "x"}}
        return describe(build_recipe({**said, "name": "n"}).model)

    with pytest.raises(InputError) as caught:
        model(width, heads)
    named = [
        int(n) for n in caught.value.hint.partition(":")[2].replace(",", " ").replace(";", " ").split() if n.isdigit()
    ]
    assert named
    for number in named:
        assert model(width, number) if width % 2 == 0 else model(number, heads)


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("train: [{path: x, wieght: 2}]", "did you mean data.train.0.weight?"),
        ("train: [{path: x}, {path: y, epocs: 2}]", "did you mean data.train.1.epochs?"),
        ("train: x\n  validation: [{pth: x}]", "did you mean data.validation.0.path?"),
        ("train: x\n  sequence_token: 2", "did you mean data.sequence_tokens?"),
        ("train: x\n  steps: 2", "did you mean train.steps,"),
    ],
)
def test_a_misspelt_key_is_looked_for_where_it_stands_first(tmp_path, entry, meant):
    (tmp_path / "r.yaml").write_text(f"model: first-light\ndata:\n  {entry}\n")
    with pytest.raises(InputError, match=r"unknown key data\.") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert meant in caught.value.message


def test_a_section_left_empty_has_its_defaults_and_an_empty_key_is_called_so(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: first-light\ndata: {train: x}\nname: r\n")
    plain = load_recipe(path)
    empty = "train:\n  # steps: 3\noptim:\noutput:\nstrategy:\nadapter:\n"
    path.write_text(f"model: first-light\ndata: {{train: x}}\nname: r\n{empty}")
    assert load_recipe(path) == plain
    path.write_text(
        "model: first-light\ndata: {train: x}\nstrategy:\n  zero: 2\n  offload:\ntrain:\n  balance:\n  steps: 3\n"
    )
    assert load_recipe(path).train.steps == 3
    for text, message in (
        ("data:\n", r"line 2: data is empty"),
        ("data:\n  train:\n", r"line 3: data\.train is empty"),
    ):
        path.write_text(f"model: first-light\n{text}")
        with pytest.raises(InputError, match=message):
            load_recipe(path)
    path.write_text("model: first-light\ndata: {train: x}\noptim:\n  lr:\n")
    with pytest.raises(InputError, match=r"line 4: optim\.lr is empty"):
        load_recipe(path)
