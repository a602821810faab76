"""docs/reference/run-folder.md names what training writes: every file, event, key."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tercet.spec.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/run-folder.md").read_text(encoding="utf-8")
TRAINING = sorted((ROOT / "src/tercet/training").glob("*.py"))


def keys_of(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg}


def events_written() -> dict[str, set[str]]:
    """Event kinds and their keys, from the calls that write them."""
    found: dict[str, set[str]] = {}
    for path in TRAINING:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            kinds = [
                c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant) and isinstance(c.value, str)
            ]
            if node.func.attr == "event":
                for kind in kinds:
                    found.setdefault(kind, set()).update(keys_of(node))
            elif node.func.attr == "step" and "grad_norm" in keys_of(node):
                found.setdefault("step", set()).update(keys_of(node))
    return found


def line_of(kind: str) -> str:
    return next((line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |")), "")


def test_every_event_and_its_keys_are_described():
    written = events_written()
    assert {
        "start",
        "resume",
        "step",
        "evaluate",
        "sample",
        "checkpoint",
        "skip",
        "interrupted",
        "end",
    } <= set(written)
    for kind, keys in written.items():
        line = line_of("start" if kind == "resume" else kind)
        assert line, f"event {kind} is not described"
        assert line_of(kind)
        missing = {key for key in keys if f"`{key}`" not in line}
        assert not missing, f"event {kind}: {sorted(missing)} are not described"


def test_every_key_of_the_summary_is_described():
    tree = ast.parse((ROOT / "src/tercet/training/finish.py").read_text(encoding="utf-8"))
    keys: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "summary":
            keys |= {key.value for key in node.value.keys}
    assert {"steps", "tokens_per_second", "memory"} <= keys
    part = PAGE.partition("## summary.json")[2].partition("\n## ")[0]
    assert {key for key in keys if f"`{key}`" not in part} == set()


def test_every_file_is_in_the_drawing():
    drawing = PAGE.partition("```")[2].partition("```")[0]
    run = RunFolder(Path("RUN"))
    names = {
        value.name
        for name, attribute in vars(RunFolder).items()
        if isinstance(attribute, property) and isinstance(value := getattr(run, name), Path)
    }
    assert len(names) >= 10
    assert {name for name in names if not re.search(rf"^  {re.escape(name)}\b", drawing, re.M)} == set()


@pytest.mark.parametrize("name", ["updates", "tokens", "skipped_in_a_row", "validated_step"])
def test_the_saved_state_is_described(name):
    assert f"`{name}`" in PAGE.partition("## checkpoints/")[2]
