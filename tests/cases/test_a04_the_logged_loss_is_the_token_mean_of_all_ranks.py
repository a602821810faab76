"""A04: same numbers logged for any ranks x accumulation; a fresh model starts near ln(vocabulary).

The loop trains and records as in a run; the reference is cross-entropy over the whole batch's logits, by PyTorch.
"""

from __future__ import annotations

import io
import math
import re

import pytest
import torch
import torch.nn.functional as F

from tercet.parallel.world import World
from tercet.spec.run_folder import RunFolder
from tercet.training.record import safe_console
from tests.loops import Dealt, loop_of, recorder_of
from tests.tiny import micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, STEPS = 12, 3
ALONE = World(0, 1, 0, torch.device("cpu"))


def train(world: World, word: str, micro: int, folder):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro))
    shown = io.StringIO()
    record = recorder_of(world, folder, STEPS, safe_console(shown))
    before = []  # each step's weights
    step = engine.step

    def watched(*args):
        before.append(whole_weights(engine))
        return step(*args)

    engine.step = watched
    loop_of(world, engine, Dealt(ROWS), STEPS, micro_batch=micro, record=record).run()
    if record is not None:
        record.close()
    return shown.getvalue(), before


def mean_loss(weights: dict[str, torch.Tensor], step: int) -> tuple[float, int]:
    """The token mean over the whole batch, and its trained tokens: no ranks, no micro-batches, no loss of ours."""
    (batch,) = micro_batches(step, 0, 1, ROWS, ROWS)
    model = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, ROWS)).module
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents)
    loss = F.cross_entropy(logits.double().flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    return loss.item(), batch.trained_tokens


@pytest.mark.parametrize(("size", "word", "micro"), [(1, "single", 3), (2, "ddp", 3), (3, "zero3", 1), (3, "zero1", 4)])
def test_same_on_every_layout_and_in_every_log(pools, tmp_path, size, word, micro):
    shown, before = pools[size].run(train, word, micro, tmp_path)[0]
    steps = [e for e in RunFolder(tmp_path).read_events() if e["event"] == "step"]
    expected = [mean_loss(weights, n) for n, weights in enumerate(before)]
    assert [e["loss"] for e in steps] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [e["tokens"] for e in steps] == [tokens for _, tokens in expected]
    assert steps[0]["loss"] == pytest.approx(math.log(67), rel=0.02)
    # The console shows the first step and the last.
    lines = re.findall(r"step (\d)/3 +loss ([\d.]+)", shown)
    assert lines == [(str(n), f"{expected[n - 1][0]:.4f}") for n in (1, STEPS)], shown


def norms(world: World, micro: int) -> list[float]:
    engine = tiny_engine(world, tiny_strategy("ddp", world.size, ROWS, micro))
    return [engine.step(micro_batches(n, world.rank, world.size, micro, ROWS), 1e-2).grad_norm for n in range(2)]


@pytest.mark.parametrize(("size", "micro"), [(2, 3), (3, 4)])
def test_the_norm_is_the_same_on_every_rank(pools, size, micro):
    expected = norms(ALONE, ROWS)
    for got in pools[size].run(norms, micro):
        assert got == pytest.approx(expected, rel=1e-5)
