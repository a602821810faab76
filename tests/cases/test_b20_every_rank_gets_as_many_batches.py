"""B20, the data's half: uneven ends never give one rank a batch more; padding rows carry nothing."""

from __future__ import annotations

import pytest

from tercet.data.loader import IDLE, IGNORED, Loader
from tests.texts import made, sentence, write_rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    train = write_rows(folder / "rows.jsonl", [sentence(n, 14) for n in range(7)])
    held = write_rows(folder / "held.jsonl", [sentence(100 + n, 14) for n in range(5)])
    found = made(folder, train, validation=str(held), sequence_tokens=128, long_rows="drop", vocabulary=259)
    assert (len(found.train.sources[0]), len(found.validation)) == (7, 5)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5, 7])
def test_training_batches(prepared, ranks, micro_batch, batch):
    loader = Loader(prepared, batch, 0)
    dealt = [loader.micro_batches(1, rank=r, ranks=ranks, micro_batch=micro_batch) for r in range(ranks)]
    count = -(-batch // (ranks * micro_batch))
    assert [len(d) for d in dealt] == [count] * ranks
    for rank, batches in enumerate(dealt):
        for step, found in enumerate(batches):
            places = [(step * ranks + rank) * micro_batch + j for j in range(micro_batch)]
            assert found.rows == [batch + i if i < batch else IDLE for i in places]
            assert found.input_ids.shape == found.labels.shape == found.positions.shape == (micro_batch, 128)
            for row, labels in zip(found.rows, found.labels, strict=True):
                assert (row == IDLE) == bool((labels == IGNORED).all())
            assert found.documents[-1] == micro_batch * 128


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_each_held_out_row_once(prepared, ranks, micro_batch):
    loader = Loader(prepared, 4, 0)
    dealt = [list(loader.evaluation(rank=r, ranks=ranks, micro_batch=micro_batch)) for r in range(ranks)]
    assert len({len(d) for d in dealt}) == 1
    rows = sorted(n for d in dealt for b in d for n in b.rows if n != IDLE)
    assert rows == list(range(5))
    alone = sum(b.trained_tokens for b in loader.evaluation(rank=0, ranks=1, micro_batch=5))
    assert sum(b.trained_tokens for d in dealt for b in d) == alone > 0
