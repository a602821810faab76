"""docs/guides/three-4090.md: its commands run, at a tiny size, in order; both languages show the same ones."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli import LIMIT_SECONDS, Cli
from tests.deepspeed_tiny import needs_deepspeed

ROOT = Path(__file__).parents[2]
GUIDE, CHINESE = (ROOT / "docs" / part / "guides" / "three-4090.md" for part in (".", "zh"))
TINY = [
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.ffn=96",
    "model.vocabulary=300",
    "data.sequence_tokens=64",
    "optim.warmup_steps=2",
]
PROGRAMS = ("tercet", "accelerate", "torchrun")


def blocks(path: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)
    return [text for kind, text in found if kind == language]


def commands(path: Path) -> list[tuple[list[str], int]]:
    """Return (words, exit code) of every command line."""
    found = []
    for block in blocks(path):
        for line in block.splitlines():
            if line.startswith(PROGRAMS):
                code = re.search(r"# exits (\d)", line)
                found.append((shlex.split(line.partition("  #")[0]), int(code.group(1)) if code else 0))
    return found


def small(words: list[str]) -> list[str]:
    """Return the command with sizes for a test; a resumed run gets one more step."""
    verb = next((w for w in words if w in ("train", "prepare", "bench")), None)
    if verb is None:
        return words
    if "--resume" in words:
        return [*words, "train.steps=4"]
    extra = [*TINY, *(["train.steps=3"] if verb == "train" else [])]
    extra += ["--steps", "2", "--warm-up", "1"] if verb == "bench" else []
    return [*words, *extra]


def run(cli: Cli, words: list[str], code: int) -> str:
    script = Path(sys.executable).with_name(words[0])
    environment = {
        **cli.environment,
        "PATH": f"{script.parent}{os.pathsep}{cli.environment['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(script), *words[1:]],
        cwd=cli.folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == code, f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def prepare_folder(cli: Cli) -> None:
    shutil.copytree(ROOT / "configs", cli.folder / "configs")
    (cli.folder / "published.yaml").write_text(blocks(GUIDE, "yaml")[0])


def test_both_languages_show_the_same():
    assert len(commands(GUIDE)) >= 14
    assert commands(GUIDE) == commands(CHINESE)
    assert blocks(GUIDE, "yaml") == blocks(CHINESE, "yaml")
    assert yaml.safe_load(blocks(GUIDE, "yaml")[0])["num_processes"] == 3


def test_the_commands_that_only_look_say_what_the_guide_says(cli):
    prepare_folder(cli)
    said = {}
    for words, code in commands(GUIDE):
        if words[:2] in (["tercet", "plan"], ["tercet", "doctor"]):
            said[" ".join(words[1:])] = run(cli, words, code)
    (plan,) = (text for key, text in said.items() if key.startswith("plan three-4090-llama"))
    card = float(re.search(r"deepspeed-zero3 +([\d.]+)", plan)[1])
    assert 14 < card < 18 and "links" in plan
    (refused,) = (text for key, text in said.items() if key.endswith("64GB"))
    assert "host RAM" in refused
    (fits,) = (text for key, text in said.items() if key.endswith("192GB"))
    assert "deepspeed-zero2+full+optimizer-cpu" in fits
    (written,) = (text for key, text in said.items() if "--write" in key)
    written = " ".join(written.split())  # lines are cut at 80 columns
    assert "add distributed_type: DEEPSPEED" in written and written.count("dead:") == 5


@needs_deepspeed
@pytest.mark.slow
def test_every_command_runs_at_a_tiny_size(cli):
    prepare_folder(cli)
    for words, code in commands(GUIDE):
        text = run(cli, small(words), code)
        if "--resume" in words:
            assert "next step 4 (saved on 3 ranks, now 2)" in text
    for name in ("llama", "llama-accelerate", "llama-torchrun", "llama-native", "deepseek"):
        assert (cli.folder / name / "model" / "config.json").is_file(), name
    losses = {name: cli.losses(name)[:3] for name in ("llama", "llama-accelerate", "llama-torchrun", "llama-native")}
    for name, found in losses.items():
        assert found == pytest.approx(losses["llama"], rel=1e-3), name
