"""E09, the trainer's side: it prints the effective batch, what stays idle, and notices ranks that contradict."""

from __future__ import annotations

import pytest

from tercet.errors import NotLegalError
from tercet.parallel.world import World
from tercet.spec.recipe import Recipe, build_recipe
from tercet.spec.strategy import Work, why_not
from tercet.training.preflight import make_plan
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy


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
    assert "2 of 258 sequences in each step are empty" in text
    assert "252 or 258" in text


def test_a_micro_batch_that_exceeds_the_batch_is_refused():
    with pytest.raises(NotLegalError, match="the largest micro-batch is 3") as caught:
        make_plan(recipe(8, {"zero": "0", "micro_batch": "4"}), 3, lambda text: None)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("started", "asked"), [(1, 3), (3, 1)])
def test_ranks_that_contradict_the_recipe_are_noticed(started, asked):
    with pytest.raises(NotLegalError, match=f"strategy.data is {asked} but {started} rank"):
        make_plan(recipe(12, {"zero": "0", "data": str(asked)}), started, lambda text: None)


def last_loss(world: World, word: str, rows: int, micro: int) -> tuple[float, float]:
    engine = tiny_engine(world, tiny_strategy(word, world.size, rows, micro))
    for step in range(2):
        result = engine.step(micro_batches(step, world.rank, world.size, micro, rows), 1e-2)
    return result.loss, result.grad_norm


@pytest.mark.parametrize("word", ["ddp", "zero3"])
@pytest.mark.parametrize("rows", [4, 5])
def test_padding_rows_of_the_only_micro_batch_weigh_nothing(pools, word, rows):
    """Micro-batch 2 on three ranks makes six places for four or five rows: one rank has none, or half of its own."""
    assert not why_not(tiny_model(), tiny_strategy(word, 3, rows, 2), Work(16, rows))
    (alone,) = pools[1].run(last_loss, "ddp", rows, rows)
    for together in pools[3].run(last_loss, word, rows, 2):
        assert together == pytest.approx(alone, rel=1e-4)
