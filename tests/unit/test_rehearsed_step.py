"""What a rehearsal tells of a step: what hides what, a trace that Perfetto opens, a picture, a third column."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tercet.rehearsal.recorder import MemorySamples, busy, exposed, trace
from tercet.report.compare import compare
from tercet.report.rehearsed import picture
from tercet.report.show import comparison_groups

SPANS = [
    (0, "aten::mm", 1.0, 3.0),
    (1, "_allgather_base_", 2.0, 5.0),  # hidden until 3
    (0, "aten::mm", 4.5, 6.0),  # hides half a second of it again
    (2, "copy to host", 5.5, 7.0),  # hidden until 6
]


def test_what_is_not_hidden_behind_computing():
    found = exposed(SPANS, 1.0, 8.0)
    assert found == pytest.approx({"compute": 3.5, "collectives": 1.5, "copies": 1.0, "host": 1.0})
    assert sum(found.values()) == pytest.approx(7.0)
    assert exposed([], 0.0, 2.0)["host"] == 2.0


def test_pauses_too_short_to_draw_are_drawn_over_and_others_kept():
    spans = [(0, "aten::mm", 0.0, 1.0), (0, "aten::add", 1.01, 2.0), (0, "aten::mm", 3.0, 4.0)]
    assert busy(spans, 0.0, 0.1) == {0: [(0.0, 2.0, "compute"), (3.0, 4.0, "compute")]}


def test_the_fullest_moment_of_each_stretch_is_kept():
    recorder = MemorySamples(10.0, 1.0)
    for seconds, size in ((10.1, 5), (10.9, 9), (10.95, 3), (12.0, 4)):
        recorder.note(seconds, size, {"weights": size, "optimizer": 0})
    assert recorder.samples() == [
        {"seconds": 0.0, "rows": {"weights": 9}},
        {"seconds": 2.0, "rows": {"weights": 4}},
    ]


def test_a_trace_names_streams_and_counts_in_microseconds():
    events = trace(SPANS, ["compute", "gather", "copies"], [{"seconds": 0.5, "rows": {"weights": 7}}], 1.0)[
        "traceEvents"
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "stream compute", "stream gather", "stream copies",
    ]  # fmt: skip
    work = [e for e in events if e["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"], e["cat"]) for e in work[:2]] == [
        (0, 0, 2e6, "compute"), (1, 1e6, 3e6, "collectives"),
    ]  # fmt: skip
    assert {"ph": "C", "pid": 0, "name": "memory", "ts": 5e5, "args": {"weights": 7}} in events


FOUND = {
    "strategy": "zero3 <&>",
    "capacity_bytes": 24 * 2**30,
    "peak_bytes": 20 * 2**30,
    "peak": {"rows": {"weights": 2**30, "activations": 3 * 2**30}},
    "step": {"seconds": 2.0, "tokens_per_second": 1000.0},
    "timeline": {
        "seconds": 2.0,
        "memory": [
            {"seconds": 0.0, "rows": {"weights": 2**30, "own": 2**30}},
            {"seconds": 1.0, "rows": {"weights": 2**30}},
        ],
        "streams": [{"name": "compute", "busy": [(0.0, 1.5, "compute")]}, {"name": "idle", "busy": []}],
    },
}


def test_the_picture_stacks_rows_and_draws_only_streams_that_did_something():
    root = ElementTree.fromstring(picture(FOUND))
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]
    areas = [e for e in root.iter() if e.tag.endswith("polygon")]
    assert (
        len(areas) == 2 and "own" in texts and "compute" in texts and "idle" not in texts and "the card's end" in texts
    )
    heights = [float(p.split(",")[1]) for p in areas[0].attrib["points"].split()]
    above = [float(p.split(",")[1]) for p in areas[1].attrib["points"].split()]
    assert max(above) <= max(heights) and min(above) < min(heights), "one lies upon the other"
    assert picture({**FOUND, "timeline": None}) == ""


def test_a_report_has_a_third_column_where_there_was_a_rehearsal():
    plan = {"ledger": {"weights": 2**30}, "step_seconds": 1.5}
    rows = compare(plan, {"step_seconds": 1.8}, FOUND)
    by_name = {(r["group"], r["what"]): r for r in rows}
    assert by_name["at the peak", "weights"]["rehearsed"] == 2**30
    assert by_name["time", "step"]["rehearsed"] == 2.0 and by_name["between steps", "weights"]["rehearsed"] is None
    (group,) = [g for g in comparison_groups(rows) if g["head"] == "figure"]
    assert group["rehearsed"] and group["rows"][0]["rehearsed"] == "2 s"
    assert not any(g["rehearsed"] for g in comparison_groups(compare(plan, {})))


@pytest.mark.parametrize("word", ["nope:3", "oom", "oom:x", "oom:0", "slow:-1", "copy:1.5"])
def test_a_fault_that_is_none_is_refused(word: str):
    done = CliRunner().invoke(app, ["rehearse", "smollm2-135m", "--gpus", "1x4090", "--fault", word])
    assert done.exit_code != 0 and word in str(done.exception) and "oom, lost, copy, slow" in done.exception.hint
