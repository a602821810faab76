"""C01: a save streams: no tensor larger than the largest parameter is made, on any rank, under any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.parallel.world import World
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy


class Largest(TorchDispatchMode):
    """Records the largest new storage, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in leaves if type(t) in (torch.Tensor, torch.nn.Parameter)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if type(t) is torch.Tensor and t.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def save(world: World, word: str, folder: str):
    engine = tiny_engine(world, tiny_strategy(word, world.size, 4))
    engine.step(micro_batches(0, world.rank, world.size, 1, 4), 1e-3)
    with Largest() as in_save:
        engine.save(Path(folder)).wait()
    with Largest() as in_export:
        for _ in engine.weights():
            pass
    largest = max(t.parameters for t in tiny_model().tensors()) * 4
    return in_save.bytes, in_export.bytes, largest


@pytest.mark.parametrize("word", ["ddp", "zero1", "zero3"])
def test_largest_new_tensor(pools, tmp_path, word):
    for in_save, in_export, largest in pools[2].run(save, word, str(tmp_path)):
        assert in_save <= largest
        # Gathering one parameter takes itself and its padding to equal shards.
        assert in_export <= largest + 2 * 32 * 4
