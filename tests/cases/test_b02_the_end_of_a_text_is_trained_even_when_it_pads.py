"""B02: what is masked is decided by length, never by a token's id: the end is trained where pad == end."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.data import tokenizer
from tercet.data.loader import IGNORED, Loader
from tercet.engine import EngineSetup, open_engine
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection
from tests.texts import made, sentence, write_rows
from tests.tiny import tiny_model, tiny_strategy

TOKENS, STEPS = 90, 120
ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def padded(tmp_path):
    """Two texts of unequal lengths and a tokenizer whose padding is its end of a text: (prepared, their ids)."""
    texts = [sentence(1, 3), sentence(2, 30)]
    words = tokenizer.train(iter(texts), 300)
    words.save(tmp_path / "words")
    config = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    config["pad_token"] = config["eos_token"]
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_rows(tmp_path / "rows.jsonl", texts)
    prepared = made(tmp_path, path, tokenizer=str(tmp_path / "words"), sequence_tokens=TOKENS)
    assert prepared.pad_id == prepared.eos_id
    documents = [words.document(t) for t in texts]
    assert sum(map(len, documents)) > TOKENS  # one row each
    return prepared, documents


def test_every_documents_end_is_a_label_and_no_padding_is(padded):
    prepared, documents = padded
    lengths = [len(d) for d in documents]
    batch = Loader(prepared, 2, 0).micro_batches(0, rank=0, ranks=1, micro_batch=2)[0]
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        length = next(n for n in lengths if labels[n - 2] == prepared.eos_id)
        assert ids[length - 1] == prepared.eos_id
        assert (ids[length:] == prepared.eos_id).all()
        assert (labels[length - 1 :] == IGNORED).all()
        assert (labels[: length - 1] != IGNORED).all()


def test_what_was_trained_stops(padded):
    """A run without the trained end would go on after the text, for as long as it may."""
    prepared, documents = padded
    model = tiny_model(vocabulary=300, context_tokens=2 * TOKENS)
    strategy = tiny_strategy("single", 1, 2, 2, tokens=TOKENS)
    setup = EngineSetup(model, strategy, OptimSection(), "fp32", ALONE, seed=7, stop_ids=(prepared.eos_id,))
    engine, loader = open_engine(setup), Loader(prepared, 2, 0)
    for step in range(STEPS):
        engine.step(loader.micro_batches(step, rank=0, ranks=1, micro_batch=2), 5e-3)
    for ids in documents:
        assert ids[-1] == prepared.eos_id
        assert engine.generate([ids[:8]], 2 * TOKENS - 8) == [ids[8:-1]]
