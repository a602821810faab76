"""Data files, recipes and run folders damaged by a seeded hand: a report, or a sentence that names the file.

Never another exception (a traceback to the user, or "a fault of Tercet"), and never no end. `pytest -m slow` tries a
thousand of them; a few are tried always.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tercet.data.prepare import prepare
from tercet.errors import TercetError
from tercet.planner.answer import plan
from tercet.report.page import write_report
from tercet.report.several import beside, show
from tercet.report.story import read_story
from tercet.spec.recipe import build_recipe, load_recipe, load_run_recipe
from tercet.spec.run_folder import open_run
from tercet.training.checkpoint import find_checkpoint
from tercet.training.lock import RunLock
from tercet.training.session import begun, has_trained
from tests.cases.test_g32_mutated_model_folders import JUNK
from tests.run_folders import FakeRun

LIMIT_SECONDS = 60
Try = Callable[[Path, random.Random], tuple[str, Callable[[], object]]]

TEXT = [{"text": f"The {word} was heard in the street at night, number {n}."} for n, word in enumerate("abcdefghij")]
RECIPE = """\
name: small
model: {layers: 2, width: 64, heads: 4, ffn: 96, vocabulary: 300}
data:
  train: texts.jsonl
  validation: 0.1
  sequence_tokens: 32
strategy: zero2
optim: {lr: 1e-3, warmup_steps: 5, betas: [0.9, 0.95]}
train: {batch_sequences: 12, steps: 30, precision: fp32}
output: {checkpoint_every: 10}
"""


@contextmanager
def limit() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TimeoutError("no end")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damaged(whole: bytes, hand: random.Random) -> bytes:
    """Cut, overwrite, insert, repeat, mark, or put something else in its place."""
    content = bytearray(whole or b"x")
    at = hand.randrange(len(content))
    kind = hand.randrange(7)
    if kind == 0:
        content = content[:at]
    elif kind == 1:
        for _ in range(hand.randrange(1, 20)):
            content[hand.randrange(len(content))] = hand.randrange(256)
    elif kind == 2:
        content[at:at] = bytes(hand.randrange(256) for _ in range(hand.randrange(1, 40)))
    elif kind == 3:
        content[at:at] = content[: hand.randrange(len(content))]
    elif kind == 4:
        content = bytearray(b"\xef\xbb\xbf") + content
    elif kind == 5:
        junk = [
            b"",
            b"[]",
            b"null",
            b"[" * 9999,
            b"{" * 9999,
            b"<!DOCTYPE html>",
            b"version https://git-lfs",
            b"\xff\xfe",
        ]
        content = bytearray(hand.choice(junk))
    else:
        content[at:at] = hand.choice([b"1e999", b"-1", b"9" * 400, b"\x00", b"NaN", b"\r", b'"', b"\xc3", b"{}", b": "])
    return bytes(content)


def changed(tree: Any, hand: random.Random) -> Any:
    """Change, drop or add a value at a random place of a tree of JSON."""
    place = tree
    while isinstance(place, dict | list) and place:
        key = hand.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and hand.random() < 0.6:
            place = inner
            continue
        if hand.random() < 0.25:
            del place[key]
        else:
            place[key] = hand.choice(JUNK)
        break
    return tree


def data_file(folder: Path, hand: random.Random) -> tuple[str, Callable[[], object]]:
    name = hand.choice(["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.arrow"])
    content = b"".join(json.dumps(row).encode() + b"\n" for row in TEXT)
    if name == "a.json":
        content = json.dumps(TEXT).encode()
    elif name == "a.csv":
        content = b"text\n" + b"".join(f'"{row["text"]}"\n'.encode() for row in TEXT)
    elif name == "a.parquet":
        content = parquet()
    elif name == "a.jsonl.gz":
        import gzip

        content = gzip.compress(content)
    file = folder / name
    file.write_bytes(damaged(content, hand))
    section = build_recipe(
        {
            "model": {"layers": "2", "width": "32", "heads": "2", "ffn": "64", "vocabulary": "300"},
            "data": {
                "train": str(file),
                "validation": "0.2",
                "sequence_tokens": "32",
                "tokenizer": "train",
                "long_rows": "split",
                "bad_rows": hand.choice(["stop", "skip"]),
            },
            "train": {"steps": "3"},
        }
    ).data
    return f"data {name}", lambda: prepare(section, vocabulary=300, model_tokenizer=None, seed=1)


def parquet() -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    place = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXT), place)
    return place.getvalue()


def recipe(folder: Path, hand: random.Random) -> tuple[str, Callable[[], object]]:
    import yaml

    file = folder / "mine.yaml"
    if hand.random() < 0.5:
        file.write_bytes(damaged(RECIPE.encode(), hand))
    else:
        file.write_text(yaml.safe_dump(changed(yaml.safe_load(RECIPE), hand)), encoding="utf-8")

    def read() -> None:
        load_recipe(file)
        plan(str(file), gpus="3x4090")

    return "recipe", read


def run_folder(folder: Path, hand: random.Random) -> tuple[str, Callable[[], object]]:
    made = FakeRun(folder / "run", steps=4)
    made.begin()
    made.steps(1, 4)
    run = made.run
    run.summary.write_text(
        json.dumps({"finished": True, "steps": 4, "tokens": 4000, "train_loss": 1.0, "seconds": 8.0})
    )
    answer = plan(str(run.recipe), gpus="3x4090")
    run.plan.write_text(json.dumps({"strategy": answer["strategies"][0]["strategy"], "machine": answer["machine"]}))
    run.lock.write_text(json.dumps({"pid": 1 << 22, "host": "elsewhere", "ranks": []}))
    step = run.checkpoint_of(4)
    step.mkdir(parents=True)
    (step / "state.json").write_text(json.dumps({"step": 4, "tokens": 4000}))
    (step / "manifest.json").write_text(json.dumps({"files": {"state.json": {"bytes": 27, "blake2b": "00"}}}))
    files = [run.events, run.summary, run.plan, run.lock, run.recipe, step / "manifest.json", step / "state.json"]
    file = hand.choice(files)
    if file.suffix == ".json" and hand.random() < 0.6:
        file.write_text(json.dumps(changed(json.loads(file.read_text()), hand)))
    elif file == run.events and hand.random() < 0.7:
        lines = file.read_text().splitlines()
        n = hand.randrange(len(lines))
        lines[n] = json.dumps(changed(json.loads(lines[n]), hand))
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_bytes(damaged(file.read_bytes(), hand))

    def read() -> None:
        found = open_run(run.path)
        for ask in (
            lambda: write_report(found),
            lambda: show(beside([read_story(found), read_story(found)]), 80),
            lambda: load_run_recipe(found.recipe),
            lambda: (found.read_summary(), found.read_plan(), has_trained(found), begun(found)),
            lambda: find_checkpoint(found.checkpoints),
            lambda: RunLock(found.lock).release(),
        ):
            try:
                ask()
            except TercetError as error:
                names_it(error, folder)

    return f"run folder, {file.name}", read


def names_it(error: TercetError, folder: Path) -> None:
    assert str(folder) in str(error), f"names no file: {error}"
    assert len(str(error)) < 4000, f"{len(str(error))} characters"


def tried(kinds: list[Try], folder: Path, seed: int, times: int) -> list[str]:
    """Return what went wrong, a line each; the damaged files of those stay in the folder."""
    wrong = []
    for n in range(times):
        hand = random.Random(f"{seed} {n}")
        place = folder / f"case-{n}"
        place.mkdir()
        what, ask = hand.choice(kinds)(place, hand)
        try:
            with limit():
                ask()
        except TercetError as error:
            try:
                names_it(error, place)
            except AssertionError as unnamed:
                wrong.append(f"case {n}, {what}: {unnamed}")
                continue
        except BaseException as error:
            wrong.append(f"case {n}, {what}: {type(error).__name__}: {error}")
            continue
        shutil.rmtree(place)
    return wrong


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [data_file, recipe, run_folder])
def test_a_few(tmp_path, kind):
    wrong = tried([kind], tmp_path, 1, 8)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "mine.yaml: data is missing"),
        (RECIPE.replace("ffn: 96, ", ""), "mine.yaml, line 2: model: model.ffn missing"),
        (RECIPE.replace("{layers: 2", "{path: ./absent, layers: 2"), "mine.yaml: there is no file or folder"),
    ],
)
def test_a_recipe_that_says_too_little_is_named(tmp_path, text, sentence):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TercetError) as caught:
        plan(str(tmp_path / "mine.yaml"), gpus="3x4090")
    assert str(caught.value).startswith(f"{tmp_path}/{sentence}")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand(tmp_path):
    wrong = tried([data_file, recipe, run_folder], tmp_path, 2, 1000)
    assert not wrong, "\n".join(wrong)
