"""Adapters under every layout: one process and three agree, ledger rows are what is held, a save holds adapters alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tercet.parallel.world import World
from tercet.planner.ledger import ledger_for
from tercet.spec.adapter import Adapter, with_adapter
from tercet.spec.strategy import Work
from tercet.spec.trained import with_frozen
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_model, tiny_strategy

ROWS = 6
ROWS_EXACT = ("weights", "master", "gradients", "optimizer")
ADAPTER = Adapter(rank=4, alpha=8.0)
MODELS = {
    "lora": lambda: with_adapter(tiny_model(), ADAPTER),
    "rslora with dropout": lambda: with_adapter(tiny_model(), replace(ADAPTER, rslora=True, dropout=0.2)),
    "nf4": lambda: with_adapter(tiny_model(), replace(ADAPTER, quantize="nf4")),
    "lora and head": lambda: with_adapter(tiny_model(), replace(ADAPTER, modules_to_save=("lm_head", "model.norm"))),
    "experts": lambda: with_adapter(tiny_deepseek(), ADAPTER),
    "frozen": lambda: with_frozen(tiny_model(), ("embed_tokens", "model.layers.0.*", "*.k_proj")),
}


def trained(world: World, word: str, kind: str, precision: str, steps: int, keys: dict[str, Any], folder: str = ""):
    """Return (losses, norms, trained weights, held, planned) of a few steps; saves into `folder` if there is one."""
    model = MODELS[kind]()
    strategy = tiny_strategy(word, world.size, ROWS, 1, **keys)
    engine = tiny_engine(world, strategy, precision, model, lr=3e-2)
    results = [engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 3e-2) for s in range(steps)]
    if folder:
        engine.save(Path(folder)).wait()
    planned = ledger_for(
        model, strategy, Work(16, ROWS, precision, quantize="nf4" if model.quantized else "none"), world.rank
    )
    memory = engine.memory()
    names = {t.name for t in model.tensors() if model.trains(t)}
    weights = {name: value.detach().clone() for name, value in engine.weights() if name in names}
    return [r.loss for r in results], [r.grad_norm for r in results], weights, memory, planned


def get_peft(world: World) -> None:
    import peft  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def libraries(pools):
    for size in (1, 3):  # importing takes longer than any test here
        pools[size].run(get_peft, limit=240)


@pytest.fixture(scope="module")
def alone(pools):
    known: dict[str, Any] = {}

    def run(kind: str):
        if kind not in known:
            known[kind] = pools[1].run(trained, "ddp", kind, "fp32", 3, {})[0]
        return known[kind]

    return run


@pytest.mark.parametrize("kind", ["lora", "nf4", "lora and head", "experts", "frozen"])
@pytest.mark.parametrize(
    "word", [w if w in ("ddp", "zero3") else pytest.param(w, marks=pytest.mark.slow) for w in STRATEGIES]
)
def test_three_ranks_equal_one_process(pools, alone, word, kind):
    losses, norms, weights, *_ = alone(kind)
    for got_losses, got_norms, got, *_ in pools[3].run(trained, word, kind, "fp32", 3, {}):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert got_norms == pytest.approx(norms, rel=1e-4)
        assert got.keys() == weights.keys() and got
        for name, value in weights.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-5)
    assert losses[2] != losses[0]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("kind", ["lora", "nf4", "lora and head", "frozen"])
@pytest.mark.parametrize(
    ("word", "size"),
    [
        pytest.param(w, n, marks=[pytest.mark.slow] * (w in ("zero1", "zero2")))
        for w, n in (("ddp", 1), *((word, 3) for word in STRATEGIES))
    ],
)
def test_the_ledgers_rows_are_what_is_held(pools, precision, kind, word, size):
    for *_, measured, planned in pools[size].run(trained, word, kind, precision, 2, {}):
        for moment in ("between_steps", "peak"):
            got = {row: measured[moment].get(row, 0) for row in ROWS_EXACT}
            assert got == {row: planned[moment][row] for row in ROWS_EXACT}, moment


def interrupted(world: World, word: str, kind: str, folder: str, keys: dict[str, Any]):
    """Train two steps, save; return (what two more steps give, what they give after loading the save anew)."""
    model, strategy = MODELS[kind](), tiny_strategy(word, world.size, ROWS, 1, **keys)

    def go_on(engine):
        results = [engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 3e-2) for s in (2, 3)]
        return [r.loss for r in results], {n: v.detach().clone() for n, v in engine.weights()}

    engine = tiny_engine(world, strategy, "bf16", model)
    for s in range(2):
        engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 3e-2)
    engine.save(Path(folder)).wait()
    world.meet()
    again = tiny_engine(world, strategy, "bf16", model)
    again.load(Path(folder))
    return go_on(engine), go_on(again)


def loaded(world: World, word: str, kind: str, folder: str):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1), "bf16", MODELS[kind]())
    engine.load(Path(folder))
    results = [engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 3e-2) for s in (2, 3)]
    return [r.loss for r in results]


@pytest.mark.parametrize(("word", "kind"), [("zero3", "rslora with dropout"), ("zero3", "nf4"), ("ddp", "frozen")])
def test_a_resumed_run_goes_on_exactly_and_on_other_ranks(pools, tmp_path, word, kind):
    found = pools[3].run(interrupted, word, kind, str(tmp_path), {})
    for (losses, weights), (again, restored) in found:
        assert losses == again
        assert all(torch.equal(weights[name], restored[name]) for name in weights)
    names = set()
    for path in tmp_path.glob("rank-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {key.partition("/")[2] for key in file.keys()}  # noqa: SIM118
    model = MODELS[kind]()
    assert names == {t.name for t in model.tensors() if model.trains(t)}
    if "dropout" not in kind:  # whose masks follow the ranks
        (alone,) = pools[1].run(loaded, "ddp", kind, str(tmp_path))
        assert alone == pytest.approx(found[0][0][0], rel=2e-3)


@pytest.mark.parametrize("word", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_recomputing_changes_no_gradient(pools, word):
    """E22: frozen inputs and dropout; recomputation is not re-entrant, so layers get gradients and the same masks."""
    kind = "rslora with dropout"
    plain = pools[3].run(trained, word, kind, "fp32", 2, {"recompute": "none"})[0]
    for level in ("full", "selective"):
        losses, norms, weights, *_ = pools[3].run(trained, word, kind, "fp32", 2, {"recompute": level})[0]
        assert (losses, norms) == (plain[0], plain[1])
        assert all(torch.equal(weights[name], plain[2][name]) for name in weights) and norms[0] > 0
