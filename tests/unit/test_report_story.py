"""What is read from a run folder at any moment of its life."""

from __future__ import annotations

import json
import math

import pytest
from tests.run_folders import FakeRun, finished

from tercet.errors import InputError
from tercet.report.story import read_story


def test_a_finished_run(tmp_path):
    story = read_story(finished(tmp_path / "run").run)
    assert (story.state, story.parameters, story.total_steps) == ("finished", 12345, 4)
    h = story.headline
    assert (h["steps"], h["tokens"], h["validation_loss"], h["seconds"]) == (4, 4000, 2.0, 90.0)
    assert h["perplexity"] == pytest.approx(math.e**2)
    assert h["peak_bytes"] == 8000
    assert [c.best for c in story.checkpoints] == [True]
    assert story.compared


def test_an_unfinished_run_is_counted_from_its_events(tmp_path):
    fake = FakeRun(tmp_path / "run", steps=40)
    fake.begin()
    fake.step(1, tokens=10)  # the first tenth warms up and is no measure of speed
    fake.steps(2, 10)
    fake.evaluate(5, 3.0)
    fake.evaluate(10, 3.5)
    story = read_story(fake.run)
    h = story.headline
    assert story.state == "unfinished"
    assert story.summary == {}
    assert (h["steps"], h["tokens"]) == (10, 9010)
    assert h["tokens_per_second"] == pytest.approx(500.0)
    assert h["step_seconds"] == pytest.approx(2.0)
    assert h["seconds"] == pytest.approx(20.0)
    assert (h["validation_loss"], h["best_validation_loss"], h["best_validation_step"]) == (3.5, 3.0, 5)
    assert h["peak_bytes"] is None


def test_a_summary_of_an_earlier_end_is_not_taken_for_this_one(tmp_path):
    fake = finished(tmp_path / "run")
    fake.begin(step=4)
    fake.steps(5, 6)
    story = read_story(fake.run)
    assert story.state == "unfinished"
    assert story.headline["steps"] == 6
    assert story.headline["peak_bytes"] is None


def test_steps_that_were_done_again_count_once(tmp_path):
    fake = FakeRun(tmp_path / "run", steps=6)
    fake.begin()
    fake.steps(1, 5)
    fake.evaluate(5, 9.0)
    fake.begin(step=3, ranks=2)
    fake.step(4, loss=0.25)
    fake.event("interrupted", step=4)
    story = read_story(fake.run)
    assert [e["step"] for e in story.steps] == [1, 2, 3, 4]
    assert story.steps[-1]["loss"] == 0.25
    assert story.evaluations == []
    assert story.state == "interrupted"
    assert [(s.kind, s.first, s.ranks) for s in story.sessions] == [("start", 0, 3), ("resume", 3, 2)]
    assert story.headline["seconds"] == pytest.approx(12.0)  # what was done twice took its time twice


def test_a_run_that_was_begun_again_from_nothing(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.steps(1, 3)
    fake.begin()
    fake.steps(1, 2)
    assert [e["step"] for e in read_story(fake.run).steps] == [1, 2]


def test_nothing_but_a_recipe(tmp_path):
    story = read_story(FakeRun(tmp_path / "run").run)
    assert (story.state, story.steps, story.checkpoints, story.sessions) == ("not started", [], [], [])
    assert story.headline["train_loss"] is None
    assert story.headline["tokens_per_second"] is None


def test_a_failed_run_tells_the_first_real_error(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.run.logs.mkdir()
    for rank, (time, echo, message) in enumerate(((5.0, True, "closed"), (6.0, False, "late"), (4.0, False, "NaN"))):
        report = {
            "rank": rank,
            "step": 3,
            "time": time,
            "echo": echo,
            "interrupted": False,
            "message": message,
        }
        (fake.run.logs / f"error-rank-{rank}.json").write_text(json.dumps(report))
    story = read_story(fake.run)
    assert (story.state, story.failure) == ("failed", "rank 2, step 3: NaN")
    fake.run.lock.write_text("{}")
    assert read_story(fake.run).state == "running"


def test_a_torn_last_line_is_no_damage_and_a_damaged_line_is_named(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    with fake.run.events.open("ab") as file:
        file.write(b'{"event": "st{"event": "x"}\n\n[1]\n')
    fake.step(1)
    with fake.run.events.open("ab") as file:
        file.write(b'{"event": "step", "ste')
    story = read_story(fake.run)
    assert [e["step"] for e in story.steps] == [1]
    assert story.damaged_lines == [2, 4]


def test_a_loss_that_is_no_number_is_missing(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    fake.event("step", step=1, loss=None, tokens=5)
    fake.event("evaluate", step=1, validation_loss=None)
    story = read_story(fake.run)
    assert story.headline["train_loss"] is None
    assert story.headline["validation_loss"] is None
    assert story.headline["tokens"] == 5
    assert story.headline["tokens_per_second"] is None


@pytest.mark.parametrize("name", ["plan.json", "summary.json", "recipe.yaml", "data.json", "events.jsonl"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name):
    fake = finished(tmp_path / "run")
    (fake.run.path / name).write_bytes(b"{ \xff broken\n")
    if name == "events.jsonl":
        with pytest.raises(InputError, match=r"events\.jsonl holds no event that can be read: line 1"):
            read_story(fake.run)
        return
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        read_story(fake.run)


def test_a_file_that_holds_something_else_is_an_error_too(tmp_path):
    fake = finished(tmp_path / "run")
    fake.run.plan.write_text("[1, 2]")
    with pytest.raises(InputError, match=r"plan\.json cannot be read: it holds a list, not an object"):
        read_story(fake.run)


def test_checkpoints_and_what_is_wrong_with_them(tmp_path):
    fake = FakeRun(tmp_path / "run")
    fake.begin()
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (4, None)):
        fake.checkpoint(step, loss)
    (fake.run.checkpoint_of(3) / "rank-0.safetensors").write_bytes(b"x" * 599)
    (fake.run.checkpoint_of(4) / "manifest.json").unlink()
    (fake.run.checkpoints / ".step-000005.tmp").mkdir()
    found = read_story(fake.run).checkpoints
    assert [(c.step, c.bytes, c.best) for c in found] == [
        (1, 600, False),
        (2, 600, True),
        (3, 600, False),
        (4, None, False),
    ]
    assert [c.fault for c in found[:2]] == [None, None]
    assert found[2].fault == "rank-0.safetensors has 599 bytes, not 600"
    assert "manifest.json" in found[3].fault
