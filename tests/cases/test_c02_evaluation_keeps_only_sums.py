"""C02: evaluation holds logits in chunks and sums only: its peak does not grow with the rows, and it leaves nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.parallel.world import World
from tercet.spec.objective import CHUNK_TOKENS
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy

VOCABULARY, TOKENS = 50_000, 64


class Live(TorchDispatchMode):
    """Follows the bytes of all storages made inside it that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if (
                isinstance(t, torch.Tensor)
                and t._typed_storage()._data_ptr()
                and id(s := t.untyped_storage()) not in self._seen
            ):
                key, size = s.data_ptr(), s.nbytes()
                if key in self._seen:
                    continue
                self._seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(t, self._drop, key, size)
        return out

    def _drop(self, key: int, size: int) -> None:
        if key in self._seen:
            self._seen.discard(key)
            self.now -= size


@pytest.fixture(scope="module")
def engine():
    world = World(0, 1, 0, torch.device("cpu"))
    return tiny_engine(world, tiny_strategy("single", 1, 1), model=tiny_model(vocabulary=VOCABULARY, tied=True))


def evaluate(engine, rows: int, micro: int) -> tuple[int, int]:
    batches = micro_batches(0, 0, 1, micro, rows, TOKENS, VOCABULARY)
    for batch in batches:
        batch.labels[:] = batch.input_ids  # every token counts: the worst case
    with Live() as live:
        for batch in batches:
            engine.evaluate(batch)
            del batch
        gc.collect()
    return live.peak, live.now


def test_peak_does_not_grow_with_the_rows(engine):
    few, _ = evaluate(engine, 8, 8)
    many, left = evaluate(engine, 64, 8)
    assert many == pytest.approx(few, rel=0.1)
    assert left < few / 20


def test_logits_exist_in_chunks(engine):
    rows = 4 * CHUNK_TOKENS // TOKENS
    peak, _ = evaluate(engine, rows, rows)
    whole = rows * TOKENS * VOCABULARY * 4
    assert peak < 0.7 * whole
