"""Every fenced command and recipe of the README and the guides, in both languages.

Fast: each command line is parsed by the command itself, its recipe and keys are loaded, what only looks (plan, list) is
run, and recipes for cards are planned. Slow: what trains is run, at the README's own recipe and a small size.
tests/e2e/test_guide_three_4090.py runs that guide from end to end.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tercet.cli import app
from tercet.spec.recipe import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "README.zh-CN.md",
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("**/guides/*.md"))),
]
WITH_FILES = ("three-4090.md",)  # needs files that its own test writes
ROWS = "".join(
    json.dumps({"text": f"row {n}: the cat sat on the mat, and number {n} looked on"}) + "\n" for n in range(90)
)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if kind == language]


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("tercet ")]


@pytest.fixture
def there(tmp_path, monkeypatch) -> Path:
    """A folder with the texts and recipes that the pages speak of, each recipe as its page prints it."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-texts", "texts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(ROWS)
    write_recipes(tmp_path, "README.md")
    write_recipes(tmp_path, "docs/guides/getting-started.md")
    return tmp_path


def write_recipes(folder: Path, page: str) -> list[str]:
    found = []
    for block in blocks(page, "yaml"):
        if (name := re.match(r"# ([\w-]+\.yaml)\n", block)) and "data:" in block:
            (folder / name[1]).write_text(block, encoding="utf-8")
            found.append(name[1])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_of_a_page_loads(page, there):
    for name in write_recipes(there, page):
        assert load_recipe(name).data.train


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_is_understood(page, there):
    group = typer.main.get_command(app)
    for words in commands(page):
        name, rest = words[1], words[2:]
        if name.startswith("-"):
            continue
        context = group.make_context("tercet", [name, *rest])
        command = group.get_command(context, name)
        assert command is not None, words
        assert command.make_context(name, list(rest), parent=context), words
        if name in ("train", "prepare", "plan") and rest and not rest[0].startswith("-"):
            overrides = [w for w in rest[1:] if "=" in w and not w.startswith("-")]
            if Path(rest[0]).is_file() or rest[0] in shipped_recipes():
                load_recipe(rest[0], overrides)


@pytest.mark.parametrize("page", [p for p in PAGES if not p.endswith(WITH_FILES)])
def test_every_command_that_only_looks_runs(page, there):
    for words in commands(page):
        if words[1] in ("plan", "list"):
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code in (0, 3), (words, done.output, done.exception)
            assert "FITS" in done.output or words[1] == "list"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readmes_own_recipe_trains(page, cli):
    """The preset it names (135 M parameters), two short steps."""
    (cli.folder / "my-texts").mkdir()
    (cli.folder / "my-texts" / "a.jsonl").write_text(ROWS)
    write_recipes(cli.folder, page)
    short = ("train.steps=2", "train.batch_sequences=2", "data.sequence_tokens=64", "output.checkpoint_every=0")
    cli.run("prepare", "my-recipe.yaml", "--show", "2", *short)
    done = cli.run("train", "my-recipe.yaml", *short, "--ranks", "1", "--output", "run")
    assert "weights: random (preset smollm2-135m)" in done.stderr
    assert os.path.isfile(cli.folder / "run" / "model" / "tokenizer.json")
