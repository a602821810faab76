"""G15: what a tokenizer cannot write is counted per source, said, and above a share refused."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tercet.data.prepare import prepare
from tercet.errors import InputError
from tests.texts import section, sentence, write_rows

CHINESE = "我们今天"


def of_characters(folder, unknown: bool):
    """A BPE tokenizer of the letters in some English, as `tokenizers` trains it by default: no bytes."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>") if unknown else models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["</s>", *(["<unk>"] if unknown else [])]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    backend.train_from_iterator([sentence(n) for n in range(200)], trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return str(folder / "tokenizer.json")


def ready(folder, paths, tokenizer):
    said: list[str] = []
    data = section(folder, [{"path": str(p)} for p in paths], tokenizer=tokenizer)
    return prepare(data, vocabulary=None, model_tokenizer=None, seed=0, say=said.append), said


@pytest.mark.parametrize("unknown", [False, True])
def test_mostly_unwritable_text_is_refused(tmp_path, unknown):
    tokenizer = of_characters(tmp_path / "t", unknown)
    path = write_rows(tmp_path / "rows.jsonl", [f"the cat {CHINESE} (3) €5"] * 30)
    with pytest.raises(InputError, match=r"rows\.jsonl: \d+ of \d+ (characters|tokens).*cannot write this text"):
        ready(tmp_path, [path], tokenizer)


@pytest.mark.parametrize("unknown", [False, True])
def test_a_little_is_counted_for_its_source_and_said_again_from_the_cache(tmp_path, unknown):
    tokenizer = of_characters(tmp_path / "t", unknown)
    clean = write_rows(tmp_path / "clean.jsonl", [sentence(n) for n in range(20)])
    some = write_rows(tmp_path / "some.jsonl", [sentence(n) for n in range(20, 60)] + [f"the {c} cat" for c in CHINESE])
    for hit in (False, True):
        prepared, said = ready(tmp_path, [clean, some], tokenizer)
        assert prepared.hit is hit
        first, second = prepared.report["sources"]
        assert (first["lost_characters"], first["unknown_tokens"]) == (0, 0)
        assert second["lost_characters" if not unknown else "unknown_tokens"] == len(CHINESE)
        assert second["unknown_tokens" if not unknown else "lost_characters"] == 0
        warnings = [s for s in said if s.startswith("warning")]
        assert len(warnings) == 1 and "some.jsonl: 4 " in warnings[0]


def test_bytes_write_everything(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [f"{sentence(n)} {CHINESE} \u0301€🙂" for n in range(20)])
    data = section(tmp_path, path)
    said: list[str] = []
    prepared = prepare(data, vocabulary=300, model_tokenizer=None, seed=0, say=said.append)
    assert prepared.report["sources"][0]["lost_characters"] == 0
    assert not [s for s in said if "warning" in s]
