"""G04: a resumed run uses its own tokenizer; changed data is named with its rows and needs an explicit word."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer

RUN = ("data.validation=none", "train.evaluate_every=0", "train.sample_prompts=[]", "data.cache=cache")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "seven",
    "small",
    "dogs",
    "ran",
    "past",
    "old",
    "green",
    "trees",
    "near",
    "our",
    "river",
    "today",
]
OTHER = ["zebra", "quartz", "jukebox", "xylophone", "vortex", "fjord", "sphinx"]


def write(path, words, rows, seed):
    lot = random.Random(seed)
    with path.open("a", encoding="utf-8") as file:
        for _ in range(rows):
            file.write(json.dumps({"text": " ".join(lot.choices(words, k=60))}) + "\n")


def begin(cli, ranks="1"):
    """Train six steps of a run with a tokenizer of its own making, then append other rows to its file."""
    write(cli.folder / "texts.jsonl", WORDS, 120, 0)
    cli.run("train", "small.yaml", "--ranks", ranks, "--output", "run", "data.train=texts.jsonl", "train.steps=6", *RUN)
    before = tokenizer(cli)
    write(cli.folder / "texts.jsonl", OTHER, 80, 1)
    return before


def tokenizer(cli) -> dict[str, int]:
    return Tokenizer.from_file(str(cli.folder / "run" / "model" / "tokenizer.json")).get_vocab()


@pytest.mark.parametrize("ranks", ["1", pytest.param("3", marks=pytest.mark.slow)])
def test_changed_data_is_refused_with_names_and_rows_then_accepted(cli, ranks):
    before = begin(cli, ranks)
    files = {p: p.read_bytes() for p in (cli.folder / "run" / "checkpoints").rglob("*") if p.is_file()}
    kept = [cli.folder / "run" / name for name in ("recipe.yaml", "plan.json", "summary.json")]
    as_they_were = [path.read_bytes() for path in kept]
    refused = cli.run("train", "--resume", "run", "train.steps=9", code=2)
    assert [path.read_bytes() for path in kept] == as_they_were, "what was refused has changed nothing"
    for words in ("texts.jsonl has changed", "120 rows before, 200 now", "--accept-changed-data"):
        assert words in refused.stderr
    assert all(p.read_bytes() == content for p, content in files.items())
    assert len(cli.losses("run")) == 6

    accepted = cli.run("train", "--resume", "run", "--accept-changed-data", "train.steps=9")
    assert "the positions of rows already trained are lost" in accepted.stderr
    assert tokenizer(cli) == before, "ids have changed their meaning"
    losses = cli.losses("run")
    assert len(losses) == 9
    # Accepted once: what it was accepted with is now what the run is measured by.
    again = cli.run("train", "--resume", "run", "train.steps=10")
    assert "has changed" not in again.stderr
    assert tokenizer(cli) == before


@pytest.mark.slow
def test_the_kept_tokenizer_serves_when_nothing_is_cached_and_the_file_has_moved_on(cli):
    """The prepared data is gone and a tokenizer of the same rows would be made anew: the run's own is taken."""
    before = begin(cli)
    text = (cli.folder / "texts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (cli.folder / "texts.jsonl").write_text("".join(text[:120]), encoding="utf-8")
    for path in (cli.folder / "cache").iterdir():
        path.rename(cli.folder / path.name)
    done = cli.run("train", "--resume", "run", "train.steps=7")
    assert "training a tokenizer" not in done.stderr and "has changed" not in done.stderr
    assert tokenizer(cli) == before


@pytest.mark.slow
def test_a_tokenizer_file_that_was_replaced_is_not_taken(cli):
    write(cli.folder / "texts.jsonl", WORDS, 120, 0)
    write(cli.folder / "other.jsonl", OTHER, 120, 0)
    for name in ("texts", "other"):
        cli.run(
            "train", "small.yaml", "--ranks", "1", "--output", name, f"data.train={name}.jsonl", "train.steps=1", *RUN
        )
    place = cli.folder / "tok"
    place.mkdir()

    def put(name: str) -> None:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (place / file).write_bytes((cli.folder / name / "model" / file).read_bytes())

    put("texts")
    keys = ("data.train=texts.jsonl", "data.tokenizer=tok/tokenizer.json", "train.steps=2", *RUN)
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", *keys)
    before = tokenizer(cli)
    put("other")
    cli.run("train", "--resume", "run", "train.steps=3")
    assert tokenizer(cli) == before
    for file in place.iterdir():
        file.unlink()
    cli.run("train", "--resume", "run", "train.steps=4")
    assert tokenizer(cli) == before


def test_the_word_is_refused_where_it_means_nothing(cli):
    done = cli.run("train", "small.yaml", "--accept-changed-data", code=2)
    assert "--resume" in done.stderr
