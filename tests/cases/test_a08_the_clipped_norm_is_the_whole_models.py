"""A08: gradient norm and clipping are those of the unsharded model, the same on every rank."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, CLIP = 6, 0.01  # far below the norm, so clipping decides the update


def train(world: World, word: str, micro: int):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro), clip=CLIP)
    norms = [engine.step(micro_batches(s, world.rank, world.size, micro, ROWS), 1e-2).grad_norm for s in range(3)]
    return norms, whole_weights(engine)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", STRATEGIES)
def test_norm_and_update_equal_one_process(pools, size, word):
    norms, weights = pools[1].run(train, "single", 2)[0]
    assert min(norms) > 10 * CLIP
    results = pools[size].run(train, word, 1)
    assert len({tuple(r[0]) for r in results}) == 1, "ranks disagree about the norm"
    assert results[0][0] == pytest.approx(norms, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("word", ["single", "host"])
@pytest.mark.parametrize("share", [None, 0.1, 0.999, 1.001, 10.0])
def test_one_process_clips_as_torch_does(word, share):
    """`torch.nn.utils.clip_grad_norm_`: what is longer is shortened, what is shorter stays; a large eps shows lengths."""
    alone, batches = World(0, 1, 0, torch.device("cpu")), micro_batches(0, 0, 1, 2, ROWS)
    plain = tiny_engine(alone, tiny_strategy("single", 1, ROWS, 2), clip="none")
    weights = {name: torch.nn.Parameter(value) for name, value in whole_weights(plain).items()}
    norm = plain.step(batches, 1e-2).grad_norm
    for part in plain.layout.parts:
        weights[part.name].grad = part.value.grad.clone()
    clip = "none" if share is None else share * norm
    found = torch.nn.utils.clip_grad_norm_(weights.values(), torch.inf if share is None else clip)
    assert norm == pytest.approx(found.item(), rel=1e-5)
    matrices, others = ([w for w in weights.values() if (w.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1).step()
    engine = tiny_engine(alone, tiny_strategy(word, 1, ROWS, 2), clip=clip)
    assert engine.step(batches, 3e-3).grad_norm == pytest.approx(norm, rel=1e-5)
    for name, value in whole_weights(engine).items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-4, atol=1e-6)
