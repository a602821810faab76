"""B01, the data's half: borders, positions and labels of packed rows keep documents apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tercet.data import tokenizer
from tercet.data.loader import IGNORED, Loader
from tests.texts import documents, made, sentence, write_rows


def test_borders_positions_and_labels_follow_the_documents(tmp_path):
    texts = [sentence(n, 2 + n % 9) for n in range(40)]
    prepared = made(tmp_path, write_rows(tmp_path / "rows.jsonl", texts), sequence_tokens=96)
    words = tokenizer.load(prepared.tokenizer_folder / "tokenizer.json")
    wanted = sorted(words.document(t) for t in texts)
    assert documents(prepared) == wanted

    batch = Loader(prepared, prepared.train.rows_per_epoch, 0).micro_batches(0, rank=0, ranks=1, micro_batch=100)[0]
    ids, labels = batch.input_ids.flatten().numpy(), batch.labels.flatten().numpy()
    positions, borders = batch.positions.flatten().numpy(), batch.documents.numpy()
    assert borders[0] == 0 and borders[-1] == ids.size and (np.diff(borders) > 0).all()
    assert set(range(0, ids.size + 1, 96)) <= set(borders.tolist())  # no document reaches over a row's end

    found = []
    for start, end in pairwise(borders):
        assert positions[start:end].tolist() == list(range(end - start))
        assert labels[end - 1] == IGNORED  # never trained to predict the first token of the next
        if (labels[start:end] == IGNORED).all():
            assert (ids[start:end] == prepared.pad_id).all()
            continue
        assert labels[start : end - 1].tolist() == ids[start + 1 : end].tolist()
        found.append(ids[start:end].tolist())
    assert sorted(found) == wanted
    assert batch.trained_tokens == sum(len(d) - 1 for d in wanted)


def test_packing_really_packs(tmp_path):
    texts = [sentence(n, 4) for n in range(64)]
    prepared = made(tmp_path, write_rows(tmp_path / "rows.jsonl", texts), sequence_tokens=256)
    assert prepared.train.rows_per_epoch < len(texts) / 4
    assert prepared.report["padding_share"] < 0.15
