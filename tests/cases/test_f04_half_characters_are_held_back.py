"""F04: characters whose bytes span tokens arrive whole; stop strings across pieces end the text in front of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from tercet.data.tokenizer import train
from tercet.inference.text import HALF, TextStream

BYTES = train(iter(["abc"]), 259)  # no merges that matter: nearly every byte is a token of its own


def decode(ids):
    return BYTES.backend.decode(list(ids), skip_special_tokens=True)


def push_all(text: str, stops=(), prompt=""):
    ids = BYTES.encode([text])[0].tolist()
    stream = TextStream(decode, BYTES.encode([prompt])[0].tolist(), stops)
    pieces = []
    for i in ids:
        pieces.append(stream.push(i))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("text", ["模型🙂", "é👍🏽 ½", "a模"])
def test_no_piece_holds_half_a_character(text):
    pieces, _ = push_all(text, prompt="前文")
    assert len([p for p in pieces if p]) > 1
    assert all(HALF not in piece for piece in pieces)
    assert "".join(pieces) == text


@settings(deadline=None, max_examples=25)
@given(st.text(max_size=12), st.text(max_size=3))
def test_joined_it_is_the_whole_text(text, prompt):
    pieces, _ = push_all(text, prompt=prompt)
    assert "".join(pieces) == text


def sentencepiece_with_bytes() -> Tokenizer:
    """As Llama 2's: what is no piece becomes one piece a byte, and the decoder drops the first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    model = models.BPE({p: n for n, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


PIECES = sentencepiece_with_bytes()


def push_pieces(text: str, prompt: str) -> list[str]:
    before = PIECES.encode(prompt).ids if prompt else []
    stream = TextStream(PIECES.decode, before)
    return [*(stream.push(i) for i in PIECES.encode(prompt + text).ids[len(before) :]), stream.finish()]


@pytest.mark.parametrize("prompt", ["", "a", "a 前文", "🙂🙂", "é🙂", "a前🙂文🙂", "🙂½模"])
@pytest.mark.parametrize("text", ["模型🙂", "é👍🏽 ½", "a模 b"])
def test_pieces_of_one_byte_show_each_character_when_it_is_whole(text, prompt):
    pieces = [p for p in push_pieces(text, prompt) if p]
    assert "".join(pieces) == text and len(pieces) >= len(text) - 1  # a space may come with what follows
    assert all(HALF not in piece for piece in pieces)


@settings(deadline=None, max_examples=40)
@given(st.text("ab 模型🙂é½", min_size=1, max_size=8), st.text("ab 模型🙂é½", max_size=8))
def test_pieces_of_one_byte_join_to_the_whole_text(text, prompt):
    prompt = prompt.rstrip()  # a text behind it may begin with the space
    text = text if prompt else text.lstrip() or "a"  # SentencePiece writes one space in front of a text itself
    assert "".join(push_pieces(text, prompt)) == text


def test_a_character_that_stays_half_is_shown_at_the_end():
    stream = TextStream(decode)
    ids = BYTES.encode(["模"])[0].tolist()[:2]
    assert [stream.push(i) for i in ids] == ["", ""]
    assert stream.finish() == decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("模型🙂停", ["🙂"], "模型"),
        ("aab", ["ab", "zz"], "a"),
        ("abx", ["abc"], "abx"),
        ("xSTOPySTOQ", ["STOQ", "STOP"], "x"),
    ],
)
def test_stop_strings(text, stops, left):
    pieces, stream = push_all(text, stops)
    assert "".join(pieces) == left == stream.text
    assert stream.stopped == (left != text)
