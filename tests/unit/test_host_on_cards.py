"""Weights in host memory on simulated cards: fetched twice a step, bytes as promised, nothing used before it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.ranks import RankError, Ranks
from tests.unit.test_simulated_card import on_cards, uses, values


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    pool = Ranks(1)
    yield pool
    pool.stop()


def _engine(model: Any, micro: int, rows: int, device: str, precision: str = "fp32") -> Any:
    import torch
    from tests.tiny import tiny_engine, tiny_strategy

    from tercet.parallel.world import World

    world = World(0, 1, 0, torch.device(device))
    return tiny_engine(world, tiny_strategy("host", 1, rows, micro), precision, model)


def _batches(step: int, rows: int, micro: int) -> list[Any]:
    from tests.tiny import micro_batches

    from tercet.data.loader import Batch

    made = micro_batches(step, 0, 1, micro, rows)
    return [Batch(b.input_ids, b.labels, b.positions, b.documents, b.rows) for b in made]


def _model(kind: str) -> Any:
    from tests.deepseek_tiny import tiny_deepseek
    from tests.tiny import tiny_model

    return {
        "dense": lambda: tiny_model(layers=4),
        "tied": lambda: tiny_model(layers=3, tied=True),
        "deepseek": lambda: tiny_deepseek(layers=3),
    }[kind]()


@uses(values)
def steps(simulated: Any, kind: str, micro: int, rows: int, precision: str) -> dict[str, Any]:
    """Return what three steps, an evaluation and a text are on a card and on the CPU, and what crossed the link."""
    import torch

    found: dict[str, Any] = {}
    for device in ("card:0", "cpu"):
        engine = _engine(_model(kind), micro, rows, device, precision)
        results = []
        for step in range(3):
            counts = simulated.device.counts
            counts.bytes_to_card = counts.bytes_to_host = 0
            before = dict(engine.layout.fetches)
            r = engine.step(_batches(step, rows, micro), 1e-2)
            results += [r.loss, r.grad_norm]
            moved = (counts.bytes_to_card, counts.bytes_to_host)
            fetched = {n: number - before.get(n, 0) for n, number in engine.layout.fetches.items()}
        loss, _ = engine.evaluate(_batches(99, rows, micro)[0])
        weights = {name: t.cpu().clone() for name, t in engine.weights()}
        found[device] = (results, loss, weights)
        if device != "cpu":
            found |= {"fetches": fetched, "held": engine.memory(), "moved": moved}
    torch.card.synchronize()
    return found


@pytest.fixture(scope="module")
def ran(process: Ranks) -> Any:
    known: dict[Any, Any] = {}

    def of(kind: str, micro: int, rows: int = 4, precision: str = "fp32") -> dict[str, Any]:
        key = (kind, micro, rows, precision)
        if key not in known:
            (known[key],) = process.run(on_cards, steps, *key)
        return known[key]

    return of


KINDS = [("dense", 1), ("tied", 2), ("deepseek", 1)]


@pytest.mark.parametrize(("kind", "micro"), KINDS)
def test_numbers_are_the_cpus(ran: Any, kind: str, micro: int):
    found = ran(kind, micro)
    (there, loss, weights), (here, cpu_loss, cpu_weights) = found["card:0"], found["cpu"]
    assert there == pytest.approx(here, rel=1e-5) and loss == pytest.approx(cpu_loss, rel=1e-5)
    for name, tensor in cpu_weights.items():
        assert weights[name].allclose(tensor, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(("kind", "micro"), [*KINDS, ("dense", 4)])
def test_each_block_is_fetched_twice_a_step_whatever_the_micro_batches(ran: Any, kind: str, micro: int):
    found, model = ran(kind, micro), _model(kind)
    again = 2 if kind != "dense" else 1  # the embedding once more where the head or a further prediction needs it
    blocks = len(model.layers)
    assert found["fetches"] == {-1: again, **dict.fromkeys(range(blocks), 2), blocks: 1}


@pytest.mark.parametrize(
    ("kind", "micro", "precision"), [("dense", 1, "bf16"), ("dense", 4, "fp32"), ("deepseek", 1, "fp32")]
)
def test_bytes_each_way_are_those_of_the_plan(ran: Any, kind: str, micro: int, precision: str):
    from tercet.spec.axes.host import traffic
    from tercet.spec.counts import Counts

    rows, size = 4, 4 if precision == "fp32" else 2
    found, model = ran(kind, micro, rows, precision), _model(kind)
    planned = traffic(Counts(model), rows * 16, size, size)
    to_card, to_host = found["moved"]
    # Batches go up twice, for forward and for the embedding's gradient: ids, labels, positions, and where they are
    # asked for the documents' borders; so do the gates' new biases. Down come the loss, and the counts of experts.
    integers = 3 * 8 * 16 * rows
    gates = 8 * 8 * 2 * (len(model.layers) + len(model.mtp)) if kind == "deepseek" else 0  # experts' shares and biases
    assert planned.to_card + integers <= to_card <= planned.to_card + 2.5 * integers + gates + 16 * 64
    # The gates' counts come down and their biases are read in every layer: small beside one block's gradient.
    assert planned.to_host <= to_host <= planned.to_host + 4 * gates + 64 < planned.to_host * 1.02 + 4 * gates


@pytest.mark.parametrize(("kind", "micro"), KINDS)
def test_between_steps_the_card_holds_nothing_and_at_the_peak_what_the_ledger_says(ran: Any, kind: str, micro: int):
    from tests.tiny import tiny_strategy

    from tercet.planner.ledger import ledger_for
    from tercet.spec.strategy import Work

    held = ran(kind, micro)["held"]
    planned = ledger_for(_model(kind), tiny_strategy("host", 1, 4, micro), Work(16, 4, "fp32"), on_gpu=True)["peak"]
    assert held["between_steps"]["weights"] == held["between_steps"]["gradients"] == 0
    # The ledger's rows are those of one moment, the engine's each row's own highest.
    for row in ("weights", "gradients"):
        assert planned[row] <= held["peak"][row] <= 1.6 * planned[row], row


def test_what_is_left_out_is_found(process: Ranks):
    """The card finds a copy that computing does not wait for, and room given back while it is still written."""
    for what in ("weights", "inputs", "gradients"):
        with pytest.raises(RankError, match=r"still being (written|read)|may still use|given back|differs"):
            process.run(on_cards, broken, what)


@uses(values)
def broken(simulated: Any, what: str) -> None:
    from tercet.parallel.streams import Copier

    engine = _engine(_model("dense"), 1, 4, "card:0")
    layout = engine.layout
    copier = {"weights": layout._weights, "inputs": layout._inputs, "gradients": layout._out}[what]
    copier.await_here = lambda event: None  # type: ignore[method-assign]
    assert isinstance(copier, Copier)
    whole = _engine(_model("dense"), 1, 4, "cpu")
    for step in range(2):
        here, there = (e.step(_batches(step, 4, 1), 1e-2) for e in (engine, whole))
        assert here.loss == pytest.approx(there.loss, rel=1e-5), "the loss differs"
