"""Encoding word by word gives the ids of encoding the whole, for every tokenizer that it is used for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.texts import sentence
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tercet.data import tokenizer, words
from tercet.errors import TercetError

TEXTS = [sentence(n, 40) for n in range(60)] + ["if x:\n    return  y!\n\n\n  done.\r\n\tA 1234  5's IT'S"] * 5


def trained(cutter, normalizer=None):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = cutter, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def split(pattern, **more):
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


# A pattern of the newer kind: a mark may lead a word, digits go in threes, a mark takes line breaks with it.
NEWER = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OLDER, SPACES_ONLY = words._UNITS[0], words._UNITS[1]


@pytest.fixture(scope="module")
def backends():
    return {
        "older": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "newer": trained(split(NEWER), normalizers.NFC()),
    }


def test_where_a_tokenizer_may_be_cut_is_found_out(backends):
    assert words.unit_pattern(backends["older"]) is OLDER
    assert words.unit_pattern(backends["newer"]) is SPACES_ONLY


@pytest.mark.parametrize(
    "cutter",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        split(r"\p{L}+ \p{L}+|\s+|[^\s]"),  # a piece reaches over a space
        split(r"(?<=a) |[^ ]+| +"),  # looks back
        split(r"\w+$|\w| "),  # looks at the end of the text
        split(r"[^ ]+(?= )|[^ ]| "),  # tells a space from the end
    ],
)
def test_tokenizers_that_see_across_spaces_are_left_alone(cutter):
    assert words.unit_pattern(trained(cutter)) is None


def test_other_models_normalisers_and_added_tokens_are_left_alone(backends):
    assert words.unit_pattern(trained(pre_tokenizers.ByteLevel(False), normalizers.Lowercase())) is None
    copy = Tokenizer.from_str(backends["older"].to_str())
    copy.add_tokens(["two words"])
    assert words.unit_pattern(copy) is None
    unigram = Tokenizer(models.Unigram([("a", 0.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    assert words.unit_pattern(unigram) is None


def whole(backend):
    return lambda texts: [np.array(e.ids, np.uint32) for e in backend.encode_batch_fast(texts)]


ALPHABET = st.sampled_from(
    [*"abAB é中1½'.!-", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u0301", "🙂", "\x00"]
)


@pytest.mark.parametrize("name", ["older", "newer"])
@given(batches=st.lists(st.lists(st.lists(ALPHABET, max_size=60).map("".join), max_size=5), max_size=4))
@settings(max_examples=150, deadline=None)
def test_the_ids_are_those_of_the_whole(backends, name, batches):
    backend = backends[name]
    pattern = OLDER if name == "older" else SPACES_ONLY
    fast = words.Words(whole(backend), pattern, words.token_bytes(backend))
    for batch in batches:
        expected = [i.tolist() for i in whole(backend)(batch)]
        assert [i.tolist() for i in fast.encode(batch)] == expected


def test_new_units_are_encoded_together(backends):
    """Hundreds of units in a handful of calls, with the ids that each has alone."""
    backend, calls = backends["older"], []

    def encode(texts):
        calls.append(len(texts))
        return whole(backend)(texts)

    fast = words.Words(encode, OLDER, words.token_bytes(backend))
    fast._compare = lambda texts, found: None
    texts = [sentence(n, 40) for n in range(100, 160)]
    found = fast.encode(texts)
    assert [i.tolist() for i in found] == [i.tolist() for i in whole(backend)(texts)]
    assert fast._count > 1000 and sum(calls) < fast._count / 4
    assert words.token_bytes(backends["newer"]) is None  # NFC: bytes of the tokens are not those of the text


def test_words_are_encoded_once_and_the_memory_is_bounded(backends, monkeypatch):
    seen = []

    def encode(texts):
        seen.extend(texts)
        return whole(backends["older"])(texts)

    fast = words.Words(encode, OLDER)
    fast._compare = lambda texts, found: None
    first = fast.encode(TEXTS)
    count = len(seen)
    assert count == len(set(seen))
    for _ in range(3):
        assert all(np.array_equal(a, b) for a, b in zip(fast.encode(TEXTS), first, strict=True))
    assert len(seen) == count
    long = ["x" * 5000 + " and " + "y" * 300] * 2 + TEXTS
    before = fast._count
    assert [i.tolist() for i in fast.encode(long)] == [i.tolist() for i in whole(backends["older"])(long)]
    assert not any(len(u) > words._LONGEST_UNIT for u in fast._known)
    assert fast._count <= before + 2
    monkeypatch.setattr(words, "_LIMIT_UNITS", 10)
    fast.encode(TEXTS[:2])
    assert fast._count < count


def test_a_difference_is_never_passed_on(backends):
    encode = whole(backends["older"])
    wrong = words.Words(
        lambda texts: [i[1:] if t == " qu" else i for t, i in zip(texts, encode(texts), strict=True)], OLDER
    )
    with pytest.raises(TercetError, match="differently in words"):
        wrong.encode(["the qu it"])


def test_scripts_without_spaces_go_the_direct_way(backends):
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return whole(backends["older"])(texts)

    texts = ["我在年青时候也曾经做过许多梦，后来大半忘却了，但自己也并不以为可惜。" * 3]
    words.Words(encode, OLDER).encode(texts)
    assert calls == [texts]


def test_the_tokenizer_uses_it(backends):
    assert tokenizer.train(iter(TEXTS), 300)._words is not None
