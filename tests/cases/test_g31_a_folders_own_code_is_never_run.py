"""G31: a folder may name Python of its own in config.json and tokenizer_config.json; nobody offers to run it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

import tercet
from tercet.data.tokenizer import train
from tests.cli import Cli
from tests.parity.families import reference, save

MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Slow", "own.Fast"]}


def test_generate_neither_asks_nor_runs(tmp_path, text_cache):
    cli = Cli(tmp_path, text_cache)
    place = save(reference("llama", torch.float32), tmp_path / "m")
    train(iter(["abc " * 30]), 260).save(place)
    (place / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    for name, more in (("config.json", {}), ("tokenizer_config.json", {"tokenizer_class": "Own"})):
        content = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps({**content, **more, "auto_map": MAP}))
    done = cli.run("generate", str(place), "abc", "--tokens", "2", code=None)
    assert done.returncode in (0, 2)
    assert not re.search("trust_remote_code|run.*code|Traceback|fault of Tercet", done.stdout + done.stderr)
    assert not (tmp_path / "ran").exists()


def test_no_loader_leaves_the_question_open():
    """transformers asks on the terminal unless told no, or everything is local and known."""
    for file in Path(tercet.__file__).parent.rglob("*.py"):
        for call in re.finditer(r"Auto\w+\.from_(pretrained|config)\(", file.read_text(encoding="utf-8")):
            rest = file.read_text(encoding="utf-8")[call.end() :][:200]
            if not rest.startswith(("AutoConfig.from", "PATH")):  # sentences for people, not calls
                assert "trust_remote_code=False" in rest, f"{file}: {call.group()}"
