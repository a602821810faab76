"""B02: what is masked is decided by length, never by a token's id: the end is trained where pad == end."""

from __future__ import annotations

import json

from tercet.data import tokenizer
from tercet.data.loader import IGNORED, Loader
from tests.texts import made, sentence, write_rows


def test_every_documents_end_is_a_label_and_no_padding_is(tmp_path):
    texts = [sentence(1, 3), sentence(2, 30)]
    words = tokenizer.train(iter(texts), 300)
    words.save(tmp_path / "words")
    config = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    config["pad_token"] = config["eos_token"]
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(config))

    path = write_rows(tmp_path / "rows.jsonl", texts)
    prepared = made(tmp_path, path, tokenizer=str(tmp_path / "words"), sequence_tokens=90)
    assert prepared.pad_id == prepared.eos_id
    # One row each: 90 tokens have no room for both.
    lengths = [len(words.document(t)) for t in texts]
    assert sum(lengths) > 90
    batch = Loader(prepared, 2, 0).micro_batches(0, rank=0, ranks=1, micro_batch=2)[0]
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        length = next(n for n in lengths if labels[n - 2] == prepared.eos_id)
        assert ids[length - 1] == prepared.eos_id
        assert (ids[length:] == prepared.eos_id).all()
        assert (labels[length - 1 :] == IGNORED).all()
        assert (labels[: length - 1] != IGNORED).all()
