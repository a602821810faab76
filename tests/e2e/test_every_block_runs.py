"""Every fenced command and recipe of the README, the guides and the concepts, in both languages.

Each command line is parsed by the command itself, its recipe and keys are loaded, what only looks (plan, list) is run;
each YAML block is read by what reads it, other programs' lines are held to what they name. What trains is run at the
README's own recipe here, and from top to bottom of each page in test_pages_as_they_stand.py;
tests/e2e/test_guide_three_4090.py runs that guide from end to end.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tercet.cli import app
from tercet.spec.recipe import build_recipe, load_recipe, shipped_recipes

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "README.zh-CN.md",
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("**/guides/*.md"))),
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs/concepts").glob("*.md"))),
]
CHINESE = [p for p in PAGES if p.startswith("docs/zh/")] + ["README.zh-CN.md"]
OTHER_PROGRAMS = ("accelerate", "docker", "llama-server", "source", "tensorboard", "torchrun", "vllm")
WITH_FILES = ("three-4090.md",)  # needs files that its own test writes
ROWS = "".join(
    json.dumps({"text": f"row {n}: the cat sat on the mat, and number {n} looked on"}) + "\n" for n in range(90)
)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if kind == language]


def lines(page: str) -> list[list[str]]:
    """Return the words of every line that is a command: blocks of text without a language that are no drawings."""
    found = [line for block in blocks(page, "") for line in block.splitlines()]
    known = ("tercet ", "make ", "pip ", "python ", *(f"{name} " for name in OTHER_PROGRAMS))
    return [shlex.split(line, comments=True) for line in found if line.startswith(known)]


def commands(page: str) -> list[list[str]]:
    return [words for words in lines(page) if words[0] == "tercet"]


def inline(page: str) -> list[list[str]]:
    """Return the commands within sentences that are whole: `tercet …` without an ellipsis."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    found = re.findall(r"`(tercet [^`…]+)`", text)
    return [shlex.split(" ".join(command.split())) for command in found]


def english(page: str) -> str:
    return "README.md" if page == "README.zh-CN.md" else page.replace("docs/zh/", "docs/")


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
    for words in [*commands(page), *inline(page)]:
        name, rest = words[1], words[2:]
        if name.startswith("-") or (words in inline(page) and len(words) == 2):
            continue  # a command's name alone
        context = group.make_context("tercet", [name, *rest])
        command = group.get_command(context, name)
        assert command is not None, words
        assert command.make_context(name, list(rest), parent=context), words
        if name in ("train", "prepare", "plan") and rest and not rest[0].startswith("-"):
            overrides = [w for w in rest[1:] if "=" in w and not w.startswith("-")]
            if Path(rest[0]).is_file() or rest[0] in shipped_recipes():
                load_recipe(rest[0], overrides)


@pytest.mark.parametrize("page", [p for p in PAGES if p not in CHINESE and not p.endswith(WITH_FILES)])
def test_every_command_that_only_looks_runs(page, there):
    for words in commands(page):
        if words[1] in ("plan", "list"):
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code in (0, 3), (words, done.output, done.exception)
            assert "FITS" in done.output or words[1] == "list"


@pytest.mark.parametrize("page", PAGES)
def test_every_yaml_block_is_read_by_what_reads_it(page):
    """A recipe, some of its sections, or a named file of another program that its own test runs."""
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        if "compute_environment" in tree or "doc_to_text" in tree:
            continue  # accelerate's file: test_guide_three_4090; lm-eval's task: test_pages_as_they_stand
        build_recipe({"model": "first-light", "data": {"train": "-"}} | {"name": "block"} | merged(tree))


def merged(tree: dict) -> dict:
    """Return a page's sections with the data that every recipe must name."""
    return tree | {"data": {"train": "-"} | tree.get("data", {})}


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_other_programs_names_what_is_there(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in lines(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file() or words[1] == "-m", words
        elif words[0] == "pip":
            for name in ",".join(re.findall(r"\[([\w,]+)\]", " ".join(words))).split(","):
                assert not name or name in extras, words
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.findall(r"^ {4}(?:tercet|make|pip|docker) .*", text, re.M), "commands stand in fences"


@pytest.mark.parametrize("page", CHINESE)
def test_both_languages_have_the_same_blocks(page):
    """Commands in any order (sections may be elsewhere), recipes but for their comments."""
    for found in (lines, lambda p: [yaml.safe_load(b) for b in blocks(p, "yaml")]):
        here, there = (sorted(map(str, found(p))) for p in (page, english(page)))
        assert here == there


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
