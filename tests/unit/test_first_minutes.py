"""What somebody meets first: lists of what is known, a recipe written for them, a page to watch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.run_folders import FakeRun, finished
from typer.testing import CliRunner

from tercet.cli import app
from tercet.cli.watch import _is_dead
from tercet.report.watch import page, server_for
from tercet.spec.machine import gpus
from tercet.spec.recipe import load_recipe, shipped_recipes


def tercet(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    if code == 0:
        assert done.exit_code == 0, (done.output, done.exception)
    else:
        assert getattr(done.exception, "exit_code", done.exit_code) == code
    return done.output + (str(done.exception) if done.exit_code else "")


def test_list_names_every_recipe_and_card_and_fits_a_terminal():
    text = tercet("list")
    assert all(name in text for name in [*shipped_recipes(), *gpus(), "deepseek-llm-7b"])
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(tercet("list", "cards", "--json"))
    assert [card["name"] for card in found["cards"]] == list(gpus()) and list(found) == ["cards"]
    assert "presets" in tercet("list", "preset", code=2)


def test_init_writes_a_recipe_that_loads_and_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my 'texts': #1.jsonl").write_text('{"text": "one two"}\n' * 40)
    said = tercet("init", "my 'texts': #1.jsonl", "--output", "mine.yaml")
    assert "next: tercet prepare mine.yaml" in said
    recipe = load_recipe("mine.yaml")
    assert recipe.data.train[0].path == "my 'texts': #1.jsonl" and recipe.data.tokenizer == "train"
    assert "FITS" in tercet("plan", "mine.yaml")
    assert "exists already" in tercet("init", "my 'texts': #1.jsonl", "--output", "mine.yaml", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("init",), "needs texts"),
        (("init", "none.jsonl"), "none.jsonl"),
        (("init", "a.txt", "--output", "mine.json"), "must end in .yaml"),
        (("init", "a.txt", "--model", "smollm3"), "smollm2"),
    ],
)
def test_init_leaves_nothing_behind_when_it_is_refused(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert words in tercet(*arguments, code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def begun(folder: Path) -> FakeRun:
    fake = FakeRun(folder, steps=10)
    fake.plan()
    fake.begin()
    fake.steps(1, 3)
    return fake


def test_the_page_refreshes_while_the_run_goes_on_and_stands_still_afterwards(tmp_path):
    fake = begun(tmp_path / "on")
    fake.run.lock.write_text("{}")
    text = page(fake.run, 7, _is_dead)
    assert '<meta http-equiv="refresh" content="7">' in text and "running" in text
    done = page(finished(tmp_path / "done").run, 7, _is_dead)
    assert 'http-equiv="refresh"' not in done and "finished" in done


def test_a_run_that_was_killed_is_told_from_one_that_runs(tmp_path):
    import socket

    fake = begun(tmp_path / "dead")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    record = {"pid": child.pid, "host": socket.gethostname(), "started": 1.0}
    fake.run.lock.write_text(json.dumps({"supervisor": record, "ranks": []}))
    text = page(fake.run, 7, _is_dead)
    assert "run.lock is stale" in text and 'http-equiv="refresh"' not in text


def test_a_file_that_is_being_written_is_asked_again(tmp_path):
    fake = begun(tmp_path / "half")
    fake.run.plan.write_text('{"na<b>')
    text = page(fake.run, 7, _is_dead)
    assert "plan.json" in text and 'content="7"' in text and "<b>" not in text


@pytest.fixture
def served(tmp_path):
    fake = begun(tmp_path / "run")
    fake.run.lock.write_text("{}")
    server = server_for(fake.run, 0, 1, _is_dead)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield fake, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_listens_on_loopback_for_its_own_name_only(served):
    fake, address = served
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert "3 of 10 steps" in answer.read().decode()
    fake.steps(4, 5)
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert "5 of 10 steps" in answer.read().decode()
    for request, code in (
        (urllib.request.Request(address, headers={"Host": "evil.example"}), 403),
        (urllib.request.Request(address + "../recipe.yaml"), 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        assert caught.value.code == code


@pytest.mark.slow
def test_a_browser_shows_the_next_steps_by_itself(served, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    fake, address = served
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    process = subprocess.Popen(
        [browser, *options, "--remote-debugging-port=0", address], stderr=subprocess.PIPE, text=True
    )
    try:
        seen = _requests_until(fake, address, process)
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert seen >= 2
    shot = subprocess.run(
        [browser, *options, "--virtual-time-budget=1500", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert re.search(r"\b6 of 10 steps", shot.stdout), shot.stderr


def _requests_until(fake: FakeRun, address: str, process: subprocess.Popen[str]) -> int:
    """Return how often the browser has asked for the page, once it has asked twice (or has ended)."""
    import time
    from unittest.mock import patch

    import tercet.report.watch as watching

    count, original = 0, watching.read_story

    def counted(run: object) -> object:
        nonlocal count
        count += 1
        return original(run)  # type: ignore[arg-type]

    with patch.object(watching, "read_story", counted):
        deadline = time.monotonic() + 90
        while count < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    fake.steps(4, 6)
    return count


def test_fetching_a_folder_says_that_it_is_here_already(tmp_path):
    assert "holds no config.json" in tercet("fetch", str(tmp_path), code=2)
    (tmp_path / "config.json").write_text("{}")
    said = CliRunner().invoke(app, ["fetch", str(tmp_path)])
    assert said.exit_code == 0 and "nothing to fetch" in said.output and str(tmp_path) in said.output


@pytest.mark.parametrize("width", [60, 80, 130])
def test_help_fits_the_terminal_is_whole_and_has_one_example(width):
    def shown(*words: str) -> str:
        return CliRunner().invoke(app, [*words, "--help"], terminal_width=width).output

    front = shown()
    commands = re.findall(r"^  (\w+) +\S", front.partition("Commands:")[2].partition("Example:")[0], re.M)
    assert len(commands) >= 17 and "..." not in front.partition("Commands:")[2]
    for name in ([], *([name] for name in commands)):
        text = shown(*name)
        assert len(re.findall(r"^ *Example: tercet ", text, re.M)) == 1, name
        assert max(map(len, text.splitlines())) <= width, name


def test_steps_and_gpus_are_where_people_look_for_them(monkeypatch):
    assert "steps: 7" in tercet("train", "first-light", "--steps", "7", "--print-recipe")
    assert "no cards" in tercet("train", "first-light", "--gpus", "3", code=2)
    monkeypatch.setattr("tercet.spec.cards.detect_gpus", lambda: [{"name": "a card"}] * 2)
    assert "only 2 cards" in tercet("train", "first-light", "--gpus", "3", code=2)
    assert "--ranks 3" in tercet("train", "first-light", "--gpus", "2", "--ranks", "3", code=2)
