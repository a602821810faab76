"""Each page's commands, from top to bottom, in a folder with the files that it speaks of: they run as printed.

Sizes are made small by overrides, and a tiny folder stands for published weights (135 M and 7 B parameters). Not run:
`tercet fetch` of names on the internet (test_model_hub.py has a hub of its own), programs of others but torchrun, and
what needs a card. The Chinese pages have the same blocks (test_every_block_runs.py).
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import LIMIT_SECONDS, Cli
from tests.e2e.test_every_block_runs import ROWS, blocks, lines, write_recipes
from tests.served_tiny import save_served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the README: some thirty processes

PAGES = ["README.md", "docs/guides/getting-started.md", "docs/guides/using.md", "docs/guides/lora.md",
         "docs/guides/chats.md"]  # fmt: skip
SIZES = ["model.layers=1", "model.width=32", "model.heads=2", "model.ffn=64", "model.vocabulary=300"]
SHORT = ["data.sequence_tokens=64", "train.batch_sequences=6", "optim.warmup_steps=1"]
STAND_IN = ["model=served", "data.sequence_tokens=192", "data.long_rows=split", "train.batch_sequences=2",
            "optim.warmup_steps=1"]  # fmt: skip
CHATS = '{"messages": [{"role": "user", "content": "the for?"}, {"role": "assistant", "content": "a sequence"}]}\n'
NEEDS = {"--tasks": "lm_eval", "gguf": "gguf", "ollama": "gguf", "smollm2-135m-lora": "peft", "--merge": "peft"}
SERVERS = ("serve", "watch")


@pytest.fixture
def stage(cli: Cli) -> Cli:
    """A folder with the files that the pages name, and a tiny model's."""
    for name in ("my-texts/a.jsonl", "texts/a.jsonl", "notes/a.jsonl"):
        (cli.folder / name).parent.mkdir()
        (cli.folder / name).write_text(ROWS)
    (cli.folder / "book.txt").write_text("The for statement is used to iterate.\n" * 40)
    (cli.folder / "prompts.txt").write_text("the for\nstatement\n")
    (cli.folder / "my-chats.jsonl").write_text(CHATS * 30)
    (cli.folder / "questions.jsonl").write_text('{"question": "for", "choices": [" a", " b"], "answer": 0}\n' * 3)
    for page in ("README.md", "docs/guides/getting-started.md"):
        write_recipes(cli.folder, page)
    (cli.folder / "my_task.yaml").write_text(blocks("docs/guides/using.md", "yaml")[0])
    for name in ("served", "BASE"):
        save_served(cli.folder / name, layers=8)  # blocks must be most of it for --quantize
    return cli


def small(words: list[str]) -> list[str]:
    """Return a command with sizes for a test."""
    words = ["served" if before == "--model" else word for before, word in zip(["", *words], words, strict=False)]
    verb = words[1]
    if verb == "train" and "--resume" in words:
        return [*words, "train.steps=6"]
    if verb not in ("train", "prepare") or "my-chats.jsonl" in words:
        return words
    if words[2].startswith("smollm2"):
        return [*words, *STAND_IN, *(["train.steps=3"] if verb == "train" else [])]
    if "nvme" in " ".join(words):  # files on NVMe: on the card's side only the placing differs, see test_nvme.py
        words = [w.replace("=nvme", "=cpu") for w in words]
    return [*words, *SIZES, *SHORT, *(["train.steps=3"] if verb == "train" else [])]


def skipped(words: list[str]) -> bool:
    """Whether a library that the page says to install first is not here."""
    needed = {library for word, library in NEEDS.items() if word in words}
    if "strategy.engine=deepspeed" in words:
        needed.add("deepspeed")
    return words[1] == "fetch" or any(importlib.util.find_spec(name) is None for name in needed)


def until_it_serves(cli: Cli, words: list[str]) -> None:
    """Start what serves, wait for its address, end it as Ctrl-C does."""
    process = cli.start(*words[1:], "--port", "0")
    said: list[str] = []
    try:
        for line in process.stdout or ():
            said.append(line)
            if "http://127.0.0.1:" in line:
                break
        else:
            raise AssertionError(f"{words} ended: {said}")
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode in (0, 130) and "Traceback" not in errors


def run(cli: Cli, words: list[str]) -> None:
    if words[0] == "torchrun":
        command = [str(Path(sys.executable).with_name("torchrun")), *words[1:], *SIZES, *SHORT, "train.steps=3"]
        done = subprocess.run(
            command, cwd=cli.folder, env=cli.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    elif words[0] == "tensorboard":
        assert list((cli.folder / words[words.index("--logdir") + 1]).rglob("events.out.tfevents.*"))
    elif words[0] == "tercet" and not skipped(words):
        if words[1] in SERVERS:
            until_it_serves(cli, words)
        else:
            done = cli.run(*small(words)[1:], code=None)
            assert done.returncode in ((0, 3) if words[1] == "plan" else (0,)), (words, done.stdout, done.stderr)


def first_runs(cli: Cli, page: str) -> None:
    """What a page takes for granted: the demo's run, a run of chats, a run with an adapter."""
    if page == "README.md":
        cli.run(*small(["tercet", "train", "first-light", "--ranks", "2"])[1:])
    if page == "docs/guides/using.md":
        cli.run(*small(["tercet", "train", "smollm2-135m-chat", "--output", "RUN", "data.validation=0.2"])[1:])
    if page == "docs/guides/lora.md":
        cli.run(*small(["tercet", "train", "smollm2-135m-lora", "--output", "runs/mine-1"])[1:])


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs_in_the_pages_order(page, stage):
    if page == "docs/guides/lora.md":
        pytest.importorskip("peft")
    first_runs(stage, page)
    for words in lines(page):
        written = words[words.index("--output") + 1] if "--output" in words else None
        if written and written in ("model.gguf", "model", "folder"):  # a page shows two ways to one name
            place = stage.folder / written
            if place.exists():
                place.rename(stage.folder / f"{written}.before")
        run(stage, words)
    for code in blocks(page, "python"):
        code = code.replace("Qwen/Qwen2.5-7B", "served")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=stage.folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_pages_are_those_with_commands_that_train_or_use():
    """A new page with such commands joins the list."""
    root = Path(__file__).parents[2]
    looks = {"plan", "list", "fetch", "doctor"}
    pages = ["README.md", *(str(p.relative_to(root)) for p in sorted((root / "docs/guides").glob("*.md")))]
    acts = [p for p in pages if {w[1] for w in lines(p) if w[0] == "tercet"} - looks]
    assert set(acts) - {"docs/guides/three-4090.md"} == set(PAGES)
