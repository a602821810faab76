"""E09, the trainer's side: it prints the effective batch, what stays idle, and notices ranks that contradict."""

from __future__ import annotations

import pytest

from tercet.errors import NotLegalError
from tercet.spec.recipe import Recipe, build_recipe
from tercet.training.preflight import make_plan


def recipe(batch: int, strategy: dict[str, str]) -> Recipe:
    sizes = {"layers": "1", "width": "32", "heads": "2", "ffn": "32", "vocabulary": "67"}
    return build_recipe(
        {
            "model": sizes,
            "data": {"train": "x", "sequence_tokens": "16"},
            "strategy": strategy,
            "train": {"batch_sequences": str(batch)},
        }
    )


def test_the_effective_batch_is_printed():
    said: list[str] = []
    make_plan(recipe(256, {"zero": "0", "micro_batch": "2"}), 3, said.append)
    text = "\n".join(said)
    assert "micro-batch 2 x accumulation 43 x ranks 3" in text
    assert "effective batch 256 sequences (4096 tokens)" in text
    assert "2 of 258 places" in text
    assert "252 or 258" in text


def test_a_micro_batch_that_exceeds_the_batch_is_refused():
    with pytest.raises(NotLegalError, match="the largest micro-batch is 2") as caught:
        make_plan(recipe(8, {"zero": "0", "micro_batch": "4"}), 3, lambda text: None)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("started", "asked"), [(1, 3), (3, 1)])
def test_ranks_that_contradict_the_recipe_are_noticed(started, asked):
    with pytest.raises(NotLegalError, match=f"strategy.data is {asked} but {started} rank"):
        make_plan(recipe(12, {"zero": "0", "data": str(asked)}), started, lambda text: None)
