"""B14: a huge text is encoded in pieces; the tokens are those of the whole, and the work grows linearly."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import sentencepiece

from tercet.data import tokenize, tokenizer
from tercet.data.tokenize import TextPiece, encode_stream, joint
from tests.texts import made, sentence

PIECE = 2000


def texts():
    draw = random.Random(0)
    letters = "".join(draw.choice("etaoinshrdlu") for _ in range(50_000))
    return {
        "words": " ".join(sentence(n, 30) for n in range(300)),
        "lines": "\n".join(sentence(n, 5) for n in range(1500)),
        "no spaces": letters,
        "one letter": "a" * 50_000,
        "a period": "abcabd" * 8_000,
        "digits": "1234567" * 7_000,
        "spaces": " " * 50_000 + "x",
        "chinese": "".join(draw.choice("我在年青时候也曾经做过许多梦，。") for _ in range(20_000)),
        "mixed": "".join(
            draw.choice([" the", "12", "  ", "\n\n", "中文", "é", "e\u0301", "🙂", "!?", " a", "'s", "ABC", "a"])
            for _ in range(20_000)
        ),
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    corpus = [t[:5000] for t in texts().values()]
    found = {"byte-level": tokenizer.train(iter(corpus), 600)}
    lines = [line for t in corpus for line in t.split("\n") if line.strip()]
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(folder / kind),
            vocab_size=500,
            model_type=kind,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            max_sentence_length=100_000,
            minloglevel=2,
        )
        found[kind] = tokenizer.load(folder / f"{kind}.model")
    return found


class Counting:
    """A tokenizer that counts the characters it was given."""

    def __init__(self, inner):
        self.inner, self.characters, self.longest = inner, 0, 0

    def encode(self, texts):
        self.characters += sum(map(len, texts))
        self.longest = max(self.longest, *map(len, texts))
        return self.inner.encode(texts)

    def encode_placed(self, texts):
        self.characters += sum(map(len, texts))
        return self.inner.encode_placed(texts)


@pytest.mark.parametrize("name", ["byte-level", "bpe", "unigram"])
@pytest.mark.parametrize("kind", list(texts()))
def test_pieces_give_the_tokens_of_the_whole(tokenizers, name, kind):
    words, text = tokenizers[name], texts()[kind]
    whole = words.encode([text])[0]
    counting = Counting(words)
    # Handed over in parts whose borders mean nothing, as a file is.
    parts = [TextPiece(text[n : n + 7001], n == 0, n + 7001 >= len(text)) for n in range(0, len(text), 7001)]
    found = list(encode_stream(counting, parts, PIECE))
    assert np.array_equal(np.concatenate([e.ids for e in found]), whole)
    assert [e.last for e in found] == [False] * (len(found) - 1) + [True]
    assert [e.first for e in found] == [True] + [False] * (len(found) - 1)
    assert counting.characters < 4 * len(text) + 2000  # never again and again


@pytest.mark.parametrize(("name", "how"), [("byte-level", "keep"), ("bpe", "drop"), ("unigram", "drop")])
def test_running_text_really_is_cut(tokenizers, name, how):
    counting = Counting(tokenizers[name])
    assert joint(counting) == how
    text = texts()["words"]
    found = list(encode_stream(counting, [TextPiece(text, True, True)], PIECE))
    assert len(found) > 20
    assert counting.longest < 3 * PIECE
    if name == "byte-level":
        text = texts()["no spaces"]
        assert len(list(encode_stream(counting, [TextPiece(text, True, True)], PIECE))) > 5


@pytest.mark.parametrize(("kind", "copies"), [("words", 8), ("no spaces", 2)])
def test_four_times_the_text_is_four_times_the_work_in_the_same_memory(tokenizers, monkeypatch, kind, copies):
    """A document that comes in parts, as from a file: characters encoded, and the most held at once."""
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 1 << 14)
    text, work, held = texts()[kind][:50_000], [], []
    for count in (copies, 4 * copies):
        counting = Counting(tokenizers["byte-level"])
        parts = (TextPiece(f"{text} ", n == 0, n == count - 1) for n in range(count))
        tracemalloc.start()
        tokens = sum(len(e.ids) for e in encode_stream(counting, parts, PIECE))
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        work.append(counting.characters)
        assert tokens > count * len(text) / 8
    assert work[1] < 4.5 * work[0]
    # Letters without a space are cut too, but what has been cut is not given back as early.
    assert held[1] < 1.5 * held[0] or kind == "no spaces"


def test_documents_keep_their_order_among_huge_ones(tokenizers):
    words = tokenizers["byte-level"]
    long = texts()["words"]
    given = [sentence(1), long[:30_000], "", sentence(2), long[5:40_000], "x"]
    found = list(encode_stream(words, [TextPiece(t, True, True, n) for n, t in enumerate(given)], PIECE))
    joined = {n: np.concatenate([e.ids for e in found if e.tag == n]).tolist() for n in range(len(given))}
    assert joined == {n: words.encode([t])[0].tolist() for n, t in enumerate(given)}
    assert [e.tag for e in found] == sorted(e.tag for e in found)


def test_a_huge_file_and_a_huge_row_train_the_same_tokens(tmp_path):
    text = texts()["words"] * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.json").write_text('[{"text": "' + text + '"}]')
    rows = []
    for name in ("a.txt", "a.json"):
        prepared = made(tmp_path, tmp_path / name, vocabulary=600, sequence_tokens=64)
        source = prepared.train.sources[0]
        rows.append([source.row(n)[0].tolist() for n in range(len(source))])
        words = tokenizer.load(prepared.tokenizer_folder / "tokenizer.json")
        assert [i for row in rows[-1] for i in row] == words.document(text)
    assert rows[0] == rows[1]
