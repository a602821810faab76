"""transformers' modules under every data-parallel layout: losses of one process, bytes of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.engine import EngineSetup
from tercet.engine.native import NativeEngine
from tercet.errors import InputError
from tercet.model.through_transformers import as_built
from tercet.parallel.world import World
from tercet.planner.ledger import ledger_for
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection, OptimSection
from tercet.spec.strategy import Work
from tercet.weights.reading import open_weights
from tests.tiny import STRATEGIES, micro_batches, tiny_strategy
from tests.transformers_tiny import save_tiny
from tests.twins.test_ledger import ROWS_EXACT

ROWS, STEPS = 6, 3
KINDS = ("gpt_neox", "gemma2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("tiny")
    return {kind: str(save_tiny(place / kind, kind)) for kind in KINDS}


def train(world: World, folder: str, word: str, micro: int, keys: dict, precision: str = "fp32"):
    planned_of = describe(ModelSection(path=folder, module="transformers"))
    spec = as_built(planned_of)
    strategy = tiny_strategy(word, world.size, ROWS, micro, **keys)
    optim = OptimSection(lr=1e-2, clip=0.5, eps=1e-3)
    weights = open_weights(Path(folder), spec)
    engine = NativeEngine(EngineSetup(spec, strategy, optim, precision, world, seed=7, weights=weights))
    losses = []
    for step in range(STEPS):
        result = engine.step(micro_batches(step, world.rank, world.size, micro, ROWS), 1e-2)
        losses += [result.loss, result.grad_norm]
    evaluated = [engine.evaluate(batch)[0] for batch in micro_batches(9, world.rank, world.size, micro, ROWS)]
    losses.append(world.sum(torch.tensor([sum(evaluated)], dtype=torch.float64)).item())
    planned = ledger_for(planned_of, strategy, Work(16, ROWS, precision), world.rank)
    return losses, engine.generate([[1, 2, 3]], 4), engine.memory(), planned


def assert_as_planned(measured: dict, planned: dict) -> None:
    for moment in ("between_steps", "peak"):
        got = {row: measured[moment].get(row, 0) for row in ROWS_EXACT}
        assert got == {row: planned[moment][row] for row in ROWS_EXACT}, moment


@pytest.fixture(scope="module")
def alone(folders):
    here = World(0, 1, 0, torch.device("cpu"))
    return {kind: train(here, folders[kind], "single", ROWS, {}) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("word", "keys"),
    [(word, {}) for word in STRATEGIES]
    + [("zero3", {"recompute": "full"}), ("ddp", {"recompute": "full"}), ("zero2", {"offload": {"optimizer": "cpu"}})],
)
def test_two_ranks_train_as_one_process_and_hold_what_was_planned(pools, folders, alone, kind, word, keys):
    for losses, texts, measured, planned in pools[2].run(train, folders[kind], word, 1, keys):
        assert losses == pytest.approx(alone[kind][0], rel=1e-5)
        assert texts == alone[kind][1]
        assert_as_planned(measured, planned)


@pytest.mark.parametrize("word", ["ddp", "zero3"])
def test_in_bf16(pools, folders, alone, word):
    for losses, _, measured, planned in pools[2].run(train, folders["gpt_neox"], word, 1, {}, "bf16"):
        assert losses == pytest.approx(alone["gpt_neox"][0], rel=2e-2)
        assert_as_planned(measured, planned)


def refused(world: World, folder: str) -> str:
    try:
        train(world, folder, "zero3", 1, {})
    except InputError as error:
        return error.message
    return ""


def test_a_model_whose_documents_see_one_another_is_refused_before_the_first_step(pools, tmp_path):
    folder = str(save_tiny(tmp_path, "bert", is_decoder=False))
    for sentence in pools[2].run(refused, folder):
        assert "documents in a packed row see one another, or later tokens" in sentence
