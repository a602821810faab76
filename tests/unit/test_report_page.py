"""The page: valid, self-contained, escaped, and true at any moment of a run's life."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from tests.run_folders import FakeRun, finished

from tercet.report.page import write_report

VOID = {"meta", "link", "br", "path"}


class Page(HTMLParser):
    """Checks that tags close in order; collects headings, texts, attributes."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        # An SVG path closes itself, except where it holds its title.
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag):
        return [attributes for name, attributes in self.seen if name == tag]

    def text(self, *tags):
        return " | ".join(text for tag, text in self.texts if not tags or tag in tags)


def page_of(fake: FakeRun) -> Page:
    path = write_report(fake.run)
    assert path == fake.run.report
    assert not list(fake.run.path.glob("*.tmp")) and not list(fake.run.path.glob(".*.tmp"))
    return Page(path.read_text(encoding="utf-8"))


def unfinished(folder):
    fake = FakeRun(folder, steps=9)
    fake.plan()
    fake.begin()
    fake.steps(1, 3)
    return fake


def interrupted(folder):
    fake = unfinished(folder)
    fake.checkpoint(3)
    fake.event("interrupted", step=3)
    return fake


def resumed(folder):
    fake = interrupted(folder)
    fake.begin(step=3, ranks=2)
    fake.steps(4, 9)
    fake.event("skip", step=9, loss="nan", grad_norm="inf", where="rank 1, rows 4, 7")
    fake.end(9)
    return fake


def one_step(folder):
    return finished(folder, steps=1)


def long(folder):
    fake = finished(folder, steps=2000)
    fake.plan()
    return fake


def only_a_recipe(folder):
    return FakeRun(folder)


@pytest.mark.parametrize("make", [finished, unfinished, interrupted, resumed, one_step, long, only_a_recipe])
def test_every_state_makes_a_valid_page(tmp_path, make):
    page = page_of(make(tmp_path / "run"))
    assert page.all("html")[0]["lang"] == "en"
    assert page.text("h1") == "small"
    assert page.text("title").startswith("small")
    ids = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [attributes["aria-labelledby"] for attributes in page.all("section")]
    assert labels and set(labels) <= set(ids)
    assert all(svg.get("aria-label") or svg.get("aria-hidden") == "true" for svg in page.all("svg"))
    # Wide tables scroll inside a box of their own, which the keyboard reaches.
    boxes = [a for t, a in page.seen if t == "div" and a.get("class") == "scroll"]
    assert len(boxes) == len(page.all("table"))
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in boxes)


def test_the_page_needs_nothing_from_anywhere(tmp_path):
    path = write_report(resumed(tmp_path / "run").run)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "http://" not in text.replace("http-equiv", "") and "https://" not in text
    assert not re.search(r"@import|url\(", text)
    for tag, attributes in page.seen:
        for name in ("src", "href"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    assert next(m for m in page.all("meta") if m.get("name") == "viewport")["content"].startswith("width=device-width")
    assert "prefers-color-scheme: dark" in text
    assert path.stat().st_size < 60_000


def test_a_long_run_keeps_the_page_small_and_every_spike(tmp_path):
    fake = FakeRun(tmp_path / "run", steps=20_000)
    fake.begin()
    row = {"event": "step", "grad_norm": 1.0, "lr": 1e-3, "tokens": 10, "seconds": 1.0}
    lines = [
        json.dumps({**row, "time": i, "step": i, "loss": 77.25 if i == 12_345 else 2 + 1 / i}) for i in range(1, 20_001)
    ]
    with fake.run.events.open("a") as file:
        file.write("\n".join(lines) + "\n")
    path = write_report(fake.run)
    assert path.stat().st_size < 250_000
    series = json.loads(re.search(r'id="series">(.*?)</script>', path.read_text()).group(1))
    train = series[0]["lines"][0]
    assert train["y"][train["x"].index(12_345)] == 77.25


def test_figures_are_those_of_the_run(tmp_path):
    page = page_of(finished(tmp_path / "run"))
    text = page.text()
    assert "finished" in page.text("span")
    for figure in ("2.0000", "7.389", "1.2500", "500", "4 k", "4 steps", "1 min 30 s", "7.8 KiB", "resident"):
        assert figure in text, figure
    assert "small; 12.3 k" not in text
    assert "12 345" in text  # parameters in full
    assert "texts.jsonl" in text and "0.1 of the documents" in text
    # The table: weights are exact, 1.2 kB; tokens/s 600 against 500.
    assert "exact" in page.text("td")
    assert "+33.3 %" in page.text("td")
    # 8 kB predicted, 8 kB measured: 1200 + 400 + 800 + 300 + 200 + 100 + 5000
    cells = page.text("th", "td")
    assert "resident at the peak | 7.8 KiB | 7.8 KiB | exact" in cells
    assert "activations | 300 B | – | –" in cells


def test_texts_are_escaped_and_shown_as_they_are(tmp_path):
    fake = FakeRun(tmp_path / "run", name="</title><script>alert(1)</script>")
    fake.begin()
    fake.step(1)
    nasty = "</p></script><img src=x onerror=alert(1)> & \"quotes\" 'q' {{ 7*7 }} 列表推导式 \u202e\x00\x07 end"
    fake.event("sample", step=1, prompt="提示 <b>", text=nasty)
    fake.event("skip", step=2, loss="nan", grad_norm="nan", where="<i>rank</i>")
    path = write_report(fake.run)
    raw = path.read_text(encoding="utf-8")
    page = Page(raw)
    assert page.all("img") == [] and page.all("i") and "alert(1)" not in page.text("script")
    assert len(page.all("script")) == 2
    shown = page.text("p", "b")
    assert "</p></script><img src=x onerror=alert(1)> & \"quotes\" 'q' {{ 7*7 }} 列表推导式" in shown
    assert "提示 <b>" in page.text("b")
    assert page.text("h1") == "</title><script>alert(1)</script>"
    assert "<i>rank</i>" in page.text("td")
    assert "\x00" not in raw and "\x07" not in raw and "\ufffd\ufffd end" in shown


def test_samples_run_from_the_newest_back_and_the_first_of_many_is_kept(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    for step in range(1, 101):
        fake.event("sample", step=step, prompt="p", text=f"text-{step}.")
    text = page_of(fake).text("p")
    shown = [int(n) for n in re.findall(r"text-(\d+)\.", text)]
    assert shown[0] == 100
    assert shown == sorted(shown, reverse=True)
    assert shown[1] == 99 and shown[-1] == 1
    assert len(shown) == 21


def test_skips_sessions_damage_and_failure_are_told(tmp_path):
    fake = resumed(tmp_path / "run")
    page = page_of(fake)
    assert "rank 1, rows 4, 7" in page.text("td")
    assert "Sessions" in page.text("h2") and "Skipped steps" in page.text("h2")
    assert "resumed after step 3" in page.text("title")

    broken = unfinished(tmp_path / "broken")
    with broken.run.events.open("ab") as file:
        file.write(b"not json\n")
    broken.step(4)
    assert "events.jsonl: line 5 could not be read and is missing here." in page_of(broken).text("p")

    stopped = interrupted(tmp_path / "stopped")
    assert "tercet train --resume stopped goes on after step 3." in page_of(stopped).text("p")


def test_without_validation_nothing_is_said_of_it(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.steps(1, 4)
    fake.end(4)
    page = page_of(fake)
    assert "Perplexity" not in page.text("dt")
    assert "Validation loss" not in page.text("dt")
    shown = page.text("dd", "td", "b", "small", "p", "li", "h3")
    assert "nan" not in shown and "None" not in shown.replace("None in the run folder", "")


def test_models_with_experts_have_a_chart_of_their_load(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.step(1, expert_load=1.75, idle_experts=0)
    fake.step(2, expert_load=1.25, idle_experts=0)
    page = page_of(fake)
    assert "Expert load" in page.text("h3")
    labels = [svg.get("aria-label") or "" for svg in page.all("svg")]
    assert any("fullest expert from 1.75 at step 1 to 1.25 at step 2" in label for label in labels)
    assert "Expert load" not in page_of(finished(tmp_path / "dense")).text("h3")


def test_every_experts_load_is_shown(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.step(1, expert_load=2.0, idle_experts=1)
    fake.event("experts", step=1, counts=[[10, 10, 20, 0], [10, 10, 10, 10]])
    page = page_of(fake)
    assert "Experts" in page.text("h2")
    assert "200 %" in page.text("td")
    assert "100, 100, 200, 0" in page.text("td")
    fake.event("experts", step=2, counts="broken")
    assert "Experts" not in page_of(fake).text("h2")


def test_an_older_page_is_replaced(tmp_path):
    fake = finished(tmp_path / "run")
    fake.run.report.write_text("old")
    assert "old" not in page_of(fake).text("body")
    assert fake.run.report.read_text().startswith("<!doctype html>")
