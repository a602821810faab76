"""G27: settings of an adapter that is not asked for would mean full fine-tuning, unsaid."""

from __future__ import annotations

import pytest

from tercet.errors import InputError
from tercet.spec.recipe import build_recipe

TREE = {"data": {"train": "x.jsonl"}}


@pytest.mark.parametrize("section", [{"rank": "4"}, {"targets": ["q_proj"]}, {"kind": "none", "alpha": "8"}])
def test_settings_without_a_kind(section):
    with pytest.raises(InputError, match=r"adapter.* given without an adapter: add kind: lora"):
        build_recipe({**TREE, "adapter": section})


def test_the_command_line_too():
    with pytest.raises(InputError, match=r"rank given without an adapter"):
        build_recipe(dict(TREE), ["adapter.rank=4"])


def test_no_adapter_and_a_whole_one_are_read():
    assert build_recipe({**TREE, "adapter": "none"}).adapter.kind == "none"
    assert build_recipe({**TREE, "adapter": {}}).adapter.kind == "none"
    assert build_recipe({**TREE, "adapter": {"kind": "lora", "rank": "4"}}).adapter.rank == 4
    again = build_recipe(TREE).model_dump(mode="json")  # a resolved recipe says every key
    assert build_recipe(again).adapter.kind == "none"
