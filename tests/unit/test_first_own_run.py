"""What a stranger meets between `init` and the first run of their own: each word leads to what works."""

from __future__ import annotations

from math import ceil

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.cli.init import first_run
from tercet.cli.plan import length_of
from tercet.data import first_look
from tercet.data.prepare import prepare
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


def init(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["init", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("kilobytes", [20, 60, 217, 1000, 8000, 10**6])
def test_a_first_run_suits_its_text_whatever_the_tokenizer_makes_of_it(kilobytes, pretrained, ranks):
    found = first_run(kilobytes * 1000, 300, 256, 24, ranks, pretrained)
    assert found.validation and found.batch_sequences >= ranks
    for bytes_per_token in (2.5, 4, 6):  # what a tokenizer may come to, against what was assumed
        rows = kilobytes * 1000 / bytes_per_token / 256 * (1 - found.validation)
        steps = ceil(rows / found.batch_sequences * found.epochs)
        assert found.warmup_steps <= steps / 10
        assert steps // found.evaluate_every >= 2 and steps // found.checkpoint_every >= 2
        if not pretrained and ranks <= 3 and kilobytes < 2000:
            assert 80 <= steps <= 1000


def texts(path, count=300):
    path.write_text("".join(f'{{"text": "{n} {"one two three " * 60}"}}\n' for n in range(count)))


def test_init_writes_a_first_run_that_is_not_all_warm_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path / "a.jsonl")
    init("a.jsonl", "--output", "mine.yaml")
    recipe = load_recipe("mine.yaml")
    steps = length_of(recipe)["steps"]
    assert 100 <= steps <= 1000 and recipe.optim.warmup_steps <= steps / 10
    assert steps // recipe.train.evaluate_every >= 2 and steps // recipe.output.checkpoint_every >= 2
    (tmp_path / "one.txt").write_text("a short text\n")
    assert "one document" in init("one.txt", "--output", "one.yaml")
    assert load_recipe("one.yaml").data.validation is None


def prepared(name: str):
    recipe = load_recipe(name)
    return prepare(recipe.data, vocabulary=describe(recipe.model).vocabulary, model_tokenizer=None, seed=0).report


CHAT = '{"messages": [{"role": "user", "content": "Hi %d"}, {"role": "assistant", "content": "Hello %d"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chats.jsonl", "".join(CHAT % (n, n) for n in range(40)), "bytes of chats"),
        ("qa.csv", "question,answer\n" + "".join(f"What is {n}?,It is {n}\n" for n in range(40)), "completion: answer"),
        ("my.tsv", "null\tthe body\n" + "".join(f"{n}\tsome words of {n}\n" for n in range(40)), 'text: "the body"'),
        (
            "alpaca.json",
            str([{"instruction": f"add {n}", "output": f"it is {n}"} for n in range(40)]).replace("'", '"'),
            "chats",
        ),
        ("text.jsonl", "".join(f'{{"text": "plain {n}"}}\n' for n in range(40)), "bytes of text"),
    ],
)
def test_what_init_accepts_can_be_prepared_as_it_stands(tmp_path, monkeypatch, name, content, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / name).write_text(content)
    assert says in init(name, "--output", "mine.yaml")
    report = prepared("mine.yaml")
    assert report["trained_tokens"]["train"] > 0
    assert ("chats" in report) == (says != 'text: "the body"' and says != "bytes of text")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latin1.txt", "größer ".encode("latin-1") * 50),
        ("latin1.jsonl", '{"text": "größer"}\n'.encode("latin-1") * 50),
        ("latin1.csv", "text\ngrößer\n".encode("latin-1")),
        ("sixteen.txt", "words\n".encode("utf-16")),
        ("numbers.jsonl", b'{"a": 1}\n' * 20),
    ],
)
def test_what_cannot_be_read_is_refused_by_init_as_by_prepare(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(content)
    assert refused("init", name) == refused("prepare", name, "data.tokenizer=train")
    assert not (tmp_path / "recipe.yaml").exists()


def test_init_looks_at_the_beginning_of_much_text_and_leaves_out_single_bad_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path / "a.jsonl", 50)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    assert "1 row cannot be used" in init("a.jsonl", "--output", "mine.yaml")
    monkeypatch.setattr(first_look, "LOOKED_BYTES", 5000)
    seen = first_look.look(["a.jsonl"], "TEXT")
    assert not seen.whole and seen.documents < 10 and seen.text_bytes == (tmp_path / "a.jsonl").stat().st_size
