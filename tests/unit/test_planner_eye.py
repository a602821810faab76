"""A plan for the eye: bars of memory, refusals of one line, what other values would bring, as a table and a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.planner.answer import plan
from tercet.planner.table import GIB, show, thousands, to_terminal, verdict
from tercet.planner.what_if import parse_what_if

BOX = {"gpus": "3x4090", "host_ram": "128GiB", "links": "x16,x8,x4"}
EVERY = ["host_ram", "cards", "links", "sequence"]


@pytest.fixture(scope="module")
def answer() -> dict:
    return plan("deepseek-llm-7b", [], **BOX, what_if=EVERY)


def table_of(answer: dict, name: str) -> list[dict]:
    return next(t["rows"] for t in answer["what_if"] if t["of"] == name)


def test_each_value_is_planned_as_if_it_were_asked_for(answer):
    asked = {"host_ram": "192GiB", "cards": "2x4090", "links": "x8", "sequence": "4096"}
    for name, option in (("host_ram", "host_ram"), ("links", "links")):
        row = next(r for r in table_of(answer, name) if r["says"].startswith(asked[name].replace("GiB", " GiB")))
        alone = plan("deepseek-llm-7b", [], **{**BOX, option: asked[name]})["strategies"][0]
        assert (row["strategy"], row["tokens_per_second"]) == (alone["name"], alone["tokens_per_second"])
    two = next(r for r in table_of(answer, "cards") if r["value"] == 2)
    alone = plan("deepseek-llm-7b", [], gpus="2x4090", links="x16,x8", host_ram="128GiB")["strategies"][0]
    assert two["tokens_per_second"] == pytest.approx(alone["tokens_per_second"])


def test_what_was_asked_for_stands_among_the_values(answer):
    best = answer["strategies"][0]
    for name in EVERY:
        here = [row for row in table_of(answer, name) if row["here"]]
        assert len(here) == 1, name
        assert (here[0]["strategy"], here[0]["tokens_per_second"]) == (best["name"], best["tokens_per_second"])
    assert {row["says"] for row in table_of(answer, "links")} == {"x16,x8,x4", "x4", "x8", "x16"}


def test_what_does_not_fit_says_what_is_short():
    found = plan("deepseek-llm-7b", ["strategy=zero3+full+optimizer-cpu"], **BOX, what_if=["host_ram"])
    rows = table_of(found, "host_ram")
    assert any(row["strategy"] is None and "host RAM" in row["why"] for row in rows)
    assert "does not fit" in show(found)


def test_the_text_keeps_to_eighty_columns_and_draws_the_peak(answer):
    text = show(answer, width=80)
    lines = [line for line in text.splitlines() if not line.startswith("tercet train")]
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if line.endswith("|") and "|" in line[:-1]]
    best, there = answer["strategies"][0], answer["strategies"][0]["usable_bytes"]
    assert len(bars) == 1 + sum(1 for size in best["ledger"].values() if size)
    whole = bars[-1]
    room = len(whole) - whole.index("|") - 2
    assert whole.count("#") == pytest.approx(sum(best["ledger"].values()) / there * room, abs=1)
    # The rows lie end to end: together they are as long as their sum.
    assert sum(line.count("#") for line in bars[:-1]) == pytest.approx(whole.count("#"), abs=len(bars))


@pytest.mark.parametrize(
    ("beyond", "chance", "says"),
    [(-1, 0.3, "FITS: "), (0, 0.3, "FITS: "), (1, 0.3, "FITS, BARELY: "), (1, None, "FITS: ")],
)
def test_it_fits_barely_where_the_plan_is_larger_than_the_card(answer, beyond, chance, says):
    """More is planned than a card has, and yet it is likelier to run than not (None: a CPU's rank, no card)."""
    best = {**answer["strategies"][0], "out_of_memory_chance": chance}
    best["card_bytes"] = best["usable_bytes"] + beyond
    assert verdict({**answer, "strategies": [best]}, 80).startswith(says)


def test_a_refusal_is_one_line():
    for host in ("128GiB", "16GiB"):
        found = plan(
            "deepseek-llm-7b", ["strategy.zero=3", "strategy.offload.optimizer=cpu"], **{**BOX, "host_ram": host}
        )
        text = show(found, width=80).splitlines()
        begin = text.index("Refused:") if "Refused:" in text else None
        if begin is not None:
            block = text[begin + 1 : text.index("", begin)]
            assert all(line.startswith("  ") and not line.startswith("    ") and len(line) <= 80 for line in block)
    assert text[0].startswith("DOES NOT FIT") and "host RAM short" in text[1] and text[2].startswith("Way out")


def test_words_that_a_field_engineer_does_not_know_are_not_printed(answer):
    found = plan("llama-3.2-1b", [], gpus="3x4090", batch=34)
    for text in (show(answer, details=True), show(found, details=True)):
        assert "reduced once" not in text and " places" not in text and "the links" not in text


def test_a_figure_is_not_broken_at_the_end_of_a_line():
    text = show(plan("qwen2.5-0.5b", [], gpus="2x4090,3060", host_ram="64GiB"), width=80)
    speed = thousands(plan("qwen2.5-0.5b", [], gpus="2x4090", host_ram="64GiB")["strategies"][0]["tokens_per_second"])
    assert speed in text


def test_the_picture_holds_a_bar_for_each_value_that_fits(tmp_path):
    file = tmp_path / "plan.svg"
    words = ["plan", "deepseek-llm-7b", "--gpus", "1x4090", "--host-ram", "512GiB"]
    run = CliRunner().invoke(app, [*words, "--what-if", "links,sequence", "--output", str(file)])
    assert run.exit_code == 0, run.output
    drawn = ET.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in drawn.iter(f"{space}rect") if r.get("class") in ("bar", "here")]
    fits = [r for t in plan("deepseek-llm-7b", [], gpus="1x4090", host_ram="512GiB", what_if=["links", "sequence"])["what_if"] for r in t["rows"] if r["strategy"]]  # fmt: skip
    assert len(bars) == len(fits) and sum(b.get("class") == "here" for b in bars) == 2
    # A bar's length is its speed.
    widths = [float(b.get("width", 0)) for b in bars]
    scale = widths[0] / fits[0]["tokens_per_second"]
    assert widths == pytest.approx([r["tokens_per_second"] * scale for r in fits], rel=0.02)
    assert GIB and CliRunner().invoke(app, [*words, "--output", str(file)]).exit_code != 0


def test_unknown_names_are_refused_with_the_nearest():
    assert parse_what_if("host-ram, cards") == ["host_ram", "cards"]
    for words in ("host_rum", "", "cards,colour"):
        with pytest.raises(InputError, match="--what-if"):
            parse_what_if(words)


def test_figures_are_wrapped_to_the_terminal_and_bars_are_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    bar = "up to 512   9  " + "#" * 60
    text = "source      a.txt: 1 files, 7.3 k tokens, 29 sequences, 100.0 % of what is trained, 3 times"
    *lines, last = to_terminal(f"{text}\n{bar}").split("\n")
    assert last == bar and max(map(len, lines)) <= 60 and " ".join(" ".join(lines).split()) == " ".join(text.split())
