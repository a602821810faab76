"""The front page's table is the planner's own, in both languages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import what_fits  # noqa: E402


def printed(name: str) -> dict[str, list[str]]:
    """Return model -> cells of a README's table."""
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = text.partition(what_fits.BEGIN)[2].partition(what_fits.END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: row[1:] for row in cells}


def test_both_languages_show_one_table():
    assert list(printed("README.md")) == list(what_fits.MODELS)
    assert printed("README.md") == printed("README.zh-CN.md")


@pytest.mark.parametrize("model", what_fits.MODELS)
def test_the_planner_still_says_so(model):
    """Every cell, to the two figures that it shows."""
    for text, (gpus, ram) in zip(printed("README.md")[model], what_fits.MACHINES.items(), strict=True):
        now = what_fits.shown(*what_fits.cell(model, gpus, ram))
        assert text == now, f"{model} on {gpus}, {ram}: run python bench/what_fits.py --write"
