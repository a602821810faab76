"""B19: fewer rows than a batch: the missing ones come from the next epoch. No row at all is an error with
numbers.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tercet.data.loader import Loader
from tercet.errors import InputError
from tests.texts import made, sentence, write_rows


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_few_rows_fill_a_batch(tmp_path, rows, ranks):
    texts = [sentence(n, 14) for n in range(rows)]
    prepared = made(
        tmp_path,
        write_rows(tmp_path / "rows.jsonl", texts),
        sequence_tokens=128,
        long_rows="drop",
        vocabulary=259,
    )
    assert prepared.train.rows_per_epoch == rows  # 128 tokens have room for one of them
    loader = Loader(prepared, 8, 0)
    assert loader.rows_per_epoch == rows
    used = Counter()
    for step in range(3):
        batches = [b for r in range(ranks) for b in loader.micro_batches(step, rank=r, ranks=ranks, micro_batch=2)]
        samples = [n for b in batches for n in b.rows if n >= 0]
        assert sorted(samples) == list(range(step * 8, step * 8 + 8))
        assert sum(b.trained_tokens for b in batches) > 0
        used.update(prepared.train.place(n) for n in samples)
    assert sorted(used.values()) == [24 // rows] * rows  # every row equally often


def test_no_row_is_an_error_with_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ""}\n{"text": null}\n{"text": " "}\n')
    with pytest.raises(InputError, match=r"no row is left to train on \(3 rows read, dropped: 2 empty text, 1 null"):
        made(tmp_path, path, bad_rows="skip")
    path.write_text("\n")
    with pytest.raises(InputError, match="hold no rows"):
        made(tmp_path, path)
    write_rows(path, [sentence(1, 80), sentence(2, 80)])
    with pytest.raises(
        InputError, match=r"data.train: no row is left \(dropped: 2 too long\): .*rows.jsonl\nRows over .* \(32\)"
    ):
        made(tmp_path, path, long_rows="drop")


def test_one_document_cannot_be_divided(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sentence(1)] * 3)
    with pytest.raises(InputError, match="only 1 different document"):
        made(tmp_path, path, validation=0.5)
