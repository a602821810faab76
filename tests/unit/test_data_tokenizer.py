"""Tokenizers: trained, from a file, a folder, SentencePiece; saved as folders that transformers reads
alike.
"""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
from tests.texts import documents, made, section, sentence, write_rows
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from tercet.data import hub, tokenizer
from tercet.data.prepare import prepare
from tercet.errors import InputError

TEXTS = [sentence(n, 40) for n in range(60)]
PROBES = [
    *TEXTS[:5],
    "ünknown ☃ 中文 🙂",
    "  spaces  and\nlines\n",
    "<|end_of_text|> </s>",
    "1234567890",
    "aaaa ===== ----",
]


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train(iter(TEXTS), 400)


def test_training_is_deterministic_and_knows_every_byte(trained):
    assert tokenizer.train(iter(TEXTS), 400).backend.to_str() == trained.backend.to_str()
    assert trained.size == 400
    for text in PROBES:
        assert trained.decode(trained.encode([text])[0]) == text


def test_a_text_cannot_spell_a_control_token(trained):
    ids = trained.encode([tokenizer.EOS])[0]
    assert trained.eos_id not in ids
    assert trained.decode(ids) == tokenizer.EOS


def test_the_saved_folder_is_a_hugging_face_tokenizer(trained, tmp_path):
    trained.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:5]:
        assert theirs(text).input_ids + [theirs.eos_token_id] == trained.document(text)
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    again = tokenizer.load(tmp_path / "tokenizer.json")
    assert (again.bos_id, again.eos_id, again.pad_id, again.size) == (0, 1, 2, 400)
    assert [i.tolist() for i in again.encode(PROBES)] == [i.tolist() for i in trained.encode(PROBES)]
    from_folder = tokenizer.load(tmp_path)
    assert [i.tolist() for i in from_folder.encode(PROBES)] == [i.tolist() for i in trained.encode(PROBES)]


def test_a_transformers_folder_keeps_its_template_and_pad_may_equal_end(trained, tmp_path):
    trained.save(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    config |= {"pad_token": config["eos_token"], "chat_template": "{{ messages }}"}
    del config["bos_token"]
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = tokenizer.load(tmp_path / "a")
    assert (loaded.pad_id, loaded.bos_id) == (loaded.eos_id, None)
    loaded.save(tmp_path / "b")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs.chat_template == "{{ messages }}"
    assert theirs.pad_token_id == theirs.eos_token_id


def test_a_start_token_that_the_tokenizer_names_but_does_not_add_is_added_and_saved(trained, tmp_path):
    backend = Backend.from_str(trained.backend.to_str())
    backend.post_processor = None
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.document("the")[0] == loaded.bos_id == 0
    loaded.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("the").input_ids[0] == 0


def test_settings_of_the_file_that_cut_or_fill_are_switched_off(trained, tmp_path):
    backend = Backend.from_str(trained.backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer.load(tmp_path / "tokenizer.json")
    assert ours.encode(TEXTS[:1])[0].tolist() == trained.encode(TEXTS[:1])[0].tolist()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
@pytest.mark.parametrize("fallback", [True, False])
def test_sentencepiece_gives_its_own_ids(tmp_path, kind, rule, fallback):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=400,
        model_type=kind,
        byte_fallback=fallback,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule == "nmt_nfkc",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ours = tokenizer.load(tmp_path / "m.model")
    assert [i.tolist() for i in ours.encode(PROBES)] == [original.encode(t) for t in PROBES]
    assert (ours.bos_id, ours.eos_id) == (original.bos_id(), original.eos_id())
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS[:5]:
        assert theirs(text).input_ids == [original.bos_id(), *original.encode(text)]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == original.decode(original.encode(text))


def test_sentencepiece_in_a_recipe(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    prepared = made(tmp_path, path, tokenizer=str(tmp_path / "m.model"), sequence_tokens=512)
    assert documents(prepared) == sorted([1, *original.encode(t), 2] for t in TEXTS)


def test_too_many_ids_for_the_model_names_both_numbers(trained, tmp_path):
    trained.save(tmp_path / "words")
    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    with pytest.raises(InputError, match=r"400 ids, but model\.vocabulary is 399"):
        made(tmp_path, path, tokenizer=str(tmp_path / "words"), vocabulary=399)
    made(tmp_path, path, tokenizer=str(tmp_path / "words"), vocabulary=400)
    with pytest.raises(InputError, match="400 ids"):  # a hit is checked as well
        made(tmp_path, path, tokenizer=str(tmp_path / "words"), vocabulary=399)
    with pytest.raises(InputError, match="at least 259"):
        made(tmp_path, path, vocabulary=258)


def test_tokenizers_that_cannot_be_had(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    monkeypatch.setattr(hub, "_reachable", lambda endpoint: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    no_end = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    no_end.pre_tokenizer = pre_tokenizers.Whitespace()
    no_end.save(str(tmp_path / "no_end.json"))
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.model").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("nobody/no-such-model", "hub cannot be reached"),
        ("./no/such/file.json", "there is no file or folder"),
        (str(tmp_path / "no_end.json"), "no end-of-text token"),
        (str(tmp_path / "broken.json"), "is not a tokenizer.json"),
        (str(tmp_path / "broken.model"), "is not a SentencePiece model"),
        (str(tmp_path / "empty"), "holds no tokenizer"),
        ("model", "the model brings no tokenizer"),
    ):
        with pytest.raises(InputError, match=said):
            made(tmp_path, path, tokenizer=name)


def test_the_models_own_tokenizer(trained, tmp_path):
    trained.save(tmp_path / "model")
    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    data = section(tmp_path, path, tokenizer="model")
    prepared = prepare(data, vocabulary=None, model_tokenizer=tmp_path / "model", seed=0)
    assert prepared.vocabulary == 400


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(trained, tmp_path):
    """Also where a token is a part of a character, of bytes trained here and of SentencePiece's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=330, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    for words in (trained, tokenizer.load(tmp_path)):
        for text in ("plain words", "ünknown ☃ 中文 🙂", "a\tb\n"):
            assert b"".join(map(words.bytes_of, words.encode([text])[0].tolist())) == text.encode()
        assert words.bytes_of(words.eos_id).decode() == words.backend.id_to_token(words.eos_id)
