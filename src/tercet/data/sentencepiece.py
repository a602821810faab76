"""SentencePiece models as fast tokenizers, with the ids that SentencePiece itself gives.

The model file states its normalisation and its pieces; both are rebuilt from the parts of the `tokenizers`
library (Kudo and Richardson: SentencePiece, 2018). The result is compared with SentencePiece before it is
used. Where two segmentations of a Unigram model score exactly alike (a run of one character, cut in either
order), the two libraries may choose differently; so Unigram models encode the training text through
SentencePiece itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tercet.errors import InputError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # lines of base64 and rank

# What the comparison looks at: words, repeated and outer spaces, line breaks, other scripts, composed
# characters, symbols, digits, spelled-out control tokens, repeated letters.
_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   and more ",
    "one\ntwo\n\nthree\tfour",
    "",
    " ",
    "x",
    "中文分词，标点。",
    "naïve café ﬁne Ⅳ ①",
    "emoji 🙂👍🏽 and ½",
    "12345 67,890.12 3e-4",
    "aaaaaaa aaaa aaaaaaaaaaaaa",
    "def f(x):\n    return x  # done",
    "▁ word▁inside ▁",
)


@dataclass
class Processor:
    """SentencePiece itself as an encoder, for text whose ids must be exactly its own."""

    original: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.original.encode(list(texts), num_threads=os.cpu_count() or 1)

    @property
    def unknown_id(self) -> int | None:
        return self.original.unk_id() if self.original.unk_id() >= 0 else None

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return (ids, character ranges) of each text."""
        from sentencepiece import sentencepiece_pb2 as schema

        found = []
        for text, packed in zip(texts, self.original.encode(list(texts), out_type="serialized_proto"), strict=True):
            pieces = schema.SentencePieceText.FromString(packed).pieces  # pyright: ignore[reportAttributeAccessIssue]
            # Its ranges count bytes of UTF-8.
            character = [n for n, c in enumerate(text) for _ in c.encode()] + [len(text)]
            found.append(([p.id for p in pieces], [(character[p.begin], character[p.end]) for p in pieces]))
        return found


@dataclass
class Converted:
    """A rebuilt tokenizer, its control tokens, and SentencePiece itself where that must encode (`exact`)."""

    backend: tokenizers.Tokenizer
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    exact: Processor | None


def convert(path: Path) -> Converted:
    """Return the tokenizer of a SentencePiece model file.

    Raises InputError when the file is none, when it uses something that cannot be rebuilt, or when the
    rebuilt tokenizer does not agree with SentencePiece.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as schema

    if _TIKTOKEN.match(head := path.open("rb").read(200)):
        raise InputError(
            f"data.tokenizer: {path} is a table of tiktoken (as Llama 3's), which lacks the rule that cuts words: "
            f"it begins with {head.split(chr(10).encode())[0].decode()!r}",
            "Put the tokenizer.json and tokenizer_config.json of the same repository beside it.",
        )
    proto = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(path.read_bytes())
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # protobuf and SentencePiece raise their own kinds
        raise InputError(f"data.tokenizer: {path} is not a SentencePiece model: {error}") from None
    kind = proto.trainer_spec.model_type
    if kind not in (1, 2) or proto.trainer_spec.treat_whitespace_as_suffix:
        raise InputError(
            f"data.tokenizer: {path} is a SentencePiece model of a kind that is not supported",
            "Unigram and BPE models are, with white space in front of words.",
        )
    backend = tokenizers.Tokenizer(_unigram(proto) if kind == 1 else _bpe(proto))
    backend.normalizer = _normalizer(proto.normalizer_spec)
    backend.pre_tokenizer = _pre_tokenizer(proto)
    backend.decoder = _decoder(proto)
    control = [p.piece for p in proto.pieces if p.type in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([AddedToken(c, normalized=False, special=True) for c in control])
    backend.encode_special_tokens = True
    # In a Unigram model a spelled-out control piece can only be kept apart by SentencePiece itself (`exact`).
    for text in _PROBES if kind == 1 else (*_PROBES, "<s> </s> <unk> <pad> <0x41>"):
        ours, theirs = backend.encode(text, add_special_tokens=False).ids, original.encode(text)
        if ours != theirs:
            raise InputError(
                f"data.tokenizer: {path} cannot be rebuilt exactly: {text!r} gives {ours}, SentencePiece says {theirs}",
                "Give a tokenizer.json of the same tokenizer instead.",
            )
    ids = (original.eos_id(), original.bos_id(), original.pad_id())
    eos, bos, pad = (i if i >= 0 else None for i in ids)
    return Converted(backend, eos, bos, pad, Processor(original) if kind == 1 else None)


def _unigram(proto: Any) -> models.Unigram:
    scores = [p.score for p in proto.pieces if p.type == _NORMAL] or [0.0]

    def score(piece: Any) -> float:
        if piece.type == _USER:  # SentencePiece prefers these to any other way of writing the same characters
            return len(piece.piece) * max(scores) - 0.1
        # Control and byte pieces get the lowest score: a lower one would change the price of an unknown
        # character.
        return piece.score if piece.type == _NORMAL else min(scores)

    pieces = [(p.piece, score(p)) for p in proto.pieces]
    return models.Unigram(pieces, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> models.BPE:
    """SentencePiece merges whatever two pieces make the best scored piece: every split of a piece is a
    merge.
    """
    normal = {p.piece: i for i, p in enumerate(proto.pieces) if p.type == _NORMAL}
    merges = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                merges.append((-proto.pieces[index].score, index, normal[left], left, right))
    user = any(p.type == _USER for p in proto.pieces)
    return models.BPE(
        vocab={p.piece: i for i, p in enumerate(proto.pieces)},
        merges=[(left, right) for *_, left, right in sorted(merges)],
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=user,
    )


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """Character map, then extra spaces away, then the space in front, then spaces made visible."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Only the space counts; other white space that the map left is kept.
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE if spec.escape_whitespaces else " "))
    return normalizers.Sequence(steps)


def _pre_tokenizer(proto: Any) -> pre_tokenizers.PreTokenizer | None:
    steps: list[Any] = []
    user = sorted((p.piece for p in proto.pieces if p.type == _USER), key=len, reverse=True)
    if user and proto.trainer_spec.model_type == 2:  # in a Unigram model their score does it
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, user))), "isolated"))
    if not any(_SPACE in p.piece[1:] for p in proto.pieces if p.type in (_NORMAL, _USER)):
        # No piece reaches over a space, so words can be encoded one by one, which is faster and can be
        # cached.
        steps.append(pre_tokenizers.Split(_SPACE, "merged_with_next"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _decoder(proto: Any) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
