"""tercet report A B; curves that one spike does not flatten; the bench's picture."""

from __future__ import annotations

import json
import re

from tests.run_folders import finished
from typer.testing import CliRunner

from tercet.cli import app
from tercet.report.bench import picture
from tercet.report.chart import Series, chart
from tercet.report.page import charts_of
from tercet.report.story import read_story


def test_two_runs_stand_side_by_side_with_what_differs(tmp_path):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two", 6)
    text = two.run.recipe.read_text().replace("lr: 0.0003", "lr: 0.001")
    two.run.recipe.write_text(text)
    done = CliRunner().invoke(app, ["report", str(one.run.path), str(two.run.path)])
    assert done.exit_code == 0, done.exception
    assert re.search(r"optim.lr +0.0003 +0.001", done.output)
    assert re.search(r"steps +4 +6", done.output)
    found = json.loads(CliRunner().invoke(app, ["report", str(one.run.path), str(two.run.path), "--json"]).output)
    assert found["differences"]["optim.lr"] == [0.0003, 0.001] and "data.train" not in found["differences"]
    assert [run["steps"] for run in found["runs"]] == [4, 6]


def test_one_spike_does_not_flatten_a_curve():
    points = [(float(x), 3.0 + 0.01 * (x % 7)) for x in range(200)]
    points[120] = (120.0, 5000.0)
    drawn = chart("Loss", "", [Series("train", "main", points)])
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn.lines[0].path)]
    assert max(heights) - sorted(heights)[2] > 100  # of 300: the others still fill the chart
    assert min(heights) == 0 and drawn.outside == 1
    calm = chart("Loss", "", [Series("train", "main", points[:100])])
    assert calm.outside == 0


def test_the_loss_is_drawn_once(tmp_path):
    story = read_story(finished(tmp_path / "run", 240).run)
    assert [c.title for c in charts_of(story)].count("Loss") == 1
    assert not [c.title for c in charts_of(story) if c.title.startswith("Loss from")]


def test_the_bench_has_axes_a_legend_and_a_dark_side():
    row = {
        "strategy": "zero2",
        "ranks": 3,
        "tokens_per_second": 900.0,
        "quartiles": [850.0, 950.0],
        "predicted_tokens_per_second": 1000.0,
    }
    svg = picture({"recipe": "a<b", "rehearsal": False, "rows": [row]})
    assert "a&lt;b" in svg and "prefers-color-scheme: dark" in svg
    for words in ("measured (median)", "quartiles", "predicted", "tokens/s", ">1000<", ">0<"):
        assert words in svg, words
