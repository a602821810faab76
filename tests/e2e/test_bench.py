"""tercet bench: rows measured by real runs, marked as a rehearsal on a CPU; table, JSON and picture agree."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from tercet.probe.communication import union_seconds
from tercet.report.bench import cells, markdown
from tercet.training.bench import add_efficiency


@pytest.mark.slow
def test_one_and_two_ranks(cli):
    out = cli.run(
        "bench",
        "small.yaml",
        "--ranks",
        "1,2",
        "--strategies",
        "ddp,zero3",
        "--steps",
        "3",
        "--warm-up",
        "1",
        "--output",
        "b",
        "--json",
    )
    report = json.loads(out.stdout)
    assert [(r["strategy"], r["ranks"]) for r in report["rows"]] == [("single", 1), ("ddp", 2), ("zero3", 2)]
    assert report["rehearsal"] and report["refused"] == []
    for row in report["rows"]:
        steps = list(cli.events(f"b/{'ddp' if row['strategy'] != 'zero3' else 'zero3'}-{row['ranks']}", "step"))
        rates = sorted(e["tokens_per_second"] for e in steps if 1 < e["step"] <= 4)
        assert row["tokens_per_second"] == pytest.approx(rates[1])  # the median of the three timed steps
        assert row["peak_bytes"] > 50e6
        assert (row["communication_share"] > 0) == (row["ranks"] > 1)
        assert row["mfu"] is None  # a CPU's peak is not known
    assert report["rows"][0]["efficiency"] == pytest.approx(1.0)
    text = (cli.folder / "b" / "bench.md").read_text()
    assert "A rehearsal" in text and "| zero3 | 2 |" in text
    assert ElementTree.parse(cli.folder / "b" / "bench.svg").getroot().tag.endswith("svg")
    assert not (cli.folder / "b" / "ddp-1" / "model").exists()
    again = cli.run("bench", "small.yaml", "--output", "b", code=2)
    assert "holds a bench already" in again.stderr


def test_the_union_counts_overlapping_collectives_once():
    assert union_seconds([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert union_seconds([]) == 0


def test_efficiency_is_against_the_fastest_single_rank():
    rows = [{"ranks": 1, "tokens_per_second": 850.0}, {"ranks": 3, "tokens_per_second": 2400.0}]
    add_efficiency(rows)
    assert rows[1]["efficiency"] == pytest.approx(0.941, abs=1e-3)  # the published table's three cards over one
    alone = [{"ranks": 3, "tokens_per_second": 1.0}]
    add_efficiency(alone)
    assert alone[0]["efficiency"] is None


def test_unknown_figures_are_dashes():
    row = {
        "strategy": "ddp",
        "ranks": 3,
        "micro_batch": 4,
        "accumulation": 1,
        "tokens_per_second": 2400.0,
        "quartiles": [2300.0, 2500.0],
        "efficiency": None,
        "mfu": None,
        "peak_bytes": 18 * 10**9,
        "communication_share": None,
        "predicted_tokens_per_second": None,
        "predicted_bytes": None,
    }
    assert cells(row)[5:7] == ["-", "-"] and cells(row)[-2:] == ["-", "-"]
    text = markdown(
        {
            "recipe": "r",
            "steps": 1,
            "warm_up": 1,
            "rehearsal": False,
            "overrides": [],
            "rows": [row],
            "refused": [{"strategy": "zero9", "ranks": 3, "why": "no"}],
        }
    )
    assert "rehearsal" not in text.lower() and "Refused: zero9 on 3 ranks: no" in text
