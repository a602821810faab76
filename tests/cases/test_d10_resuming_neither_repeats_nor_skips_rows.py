"""D10, the data's half: the rows of a resumed run are those of the uninterrupted one, on any number of
ranks.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tercet.data.loader import Loader
from tests.texts import made, sentence, write_rows

BATCH, STEPS = 6, 10  # 60 samples: three epochs of 20 rows, so steps cross the ends of epochs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    texts = [sentence(n, 14) for n in range(20)]
    found = made(
        folder,
        write_rows(folder / "rows.jsonl", texts),
        sequence_tokens=128,
        long_rows="drop",
        vocabulary=259,
    )
    assert found.train.rows_per_epoch == 20
    return found


def dealt(prepared, first, last, ranks, micro_batch):
    """Steps first..last, each as its rows in the order of the global batch; a new loader, as after a
    restart.
    """
    loader = Loader(prepared, BATCH, 3)
    steps = []
    for step in range(first, last):
        found = {}
        for rank in range(ranks):
            for batch in loader.micro_batches(step, rank=rank, ranks=ranks, micro_batch=micro_batch):
                for place, number in enumerate(batch.rows):
                    if number >= 0:
                        found[number] = (batch.input_ids[place], batch.labels[place], batch.positions[place])
        steps.append([torch.stack(found[n]) for n in sorted(found)])
    return steps


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 6), (2, 1), (3, 2), (3, 1), (4, 1)])
def test_interrupted_at_step_seven(prepared, ranks, micro_batch):
    whole = dealt(prepared, 0, STEPS, 3, 1)
    resumed = dealt(prepared, 0, 7, 3, 1) + dealt(prepared, 7, STEPS, ranks, micro_batch)
    assert [len(s) for s in resumed] == [BATCH] * STEPS
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))


def test_each_row_once_in_each_epoch(prepared):
    rows = [tuple(r[0].tolist()) for step in dealt(prepared, 0, STEPS, 2, 2) for r in step]
    epochs = [Counter(rows[n : n + 20]) for n in (0, 20, 40)]
    assert all(set(e.values()) == {1} and len(e) == 20 for e in epochs)
    assert rows[:20] != rows[20:40] != rows[40:]
