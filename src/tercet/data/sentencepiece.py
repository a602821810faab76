"""SentencePiece models as fast tokenizers, with the ids that SentencePiece itself gives.

transformers converts the model file (Kudo and Richardson: SentencePiece, 2018); the result is compared with
SentencePiece before it is used (decision 150). Where two segmentations of a Unigram model score exactly
alike (a run of one character, cut in either order), the two libraries may choose differently; so Unigram
models encode the training text through SentencePiece itself.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tercet.errors import InputError

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

    Raises InputError when the file is none, or when the converted tokenizer does not agree with SentencePiece.
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
    backend = _converted(path)
    backend.encode_special_tokens = True
    # In a Unigram model a spelled-out control piece can only be kept apart by SentencePiece itself (`exact`).
    for text in _PROBES if kind == 1 else (*_PROBES, "<s> </s> <unk> <pad> <0x41>"):
        ours, theirs = backend.encode(text, add_special_tokens=False).ids, original.encode(text)
        if ours != theirs:
            raise InputError(
                f"data.tokenizer: {path} cannot be converted exactly: {text!r} gives {ours}, SentencePiece says {theirs}",
                "Give a tokenizer.json of the same tokenizer instead.",
            )
    ids = (original.eos_id(), original.bos_id(), original.pad_id())
    eos, bos, pad = (i if i >= 0 else None for i in ids)
    return Converted(backend, eos, bos, pad, Processor(original) if kind == 1 else None)


def _converted(path: Path) -> tokenizers.Tokenizer:
    """Return the model as transformers converts it; it knows a SentencePiece file in a folder by its name."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").write_bytes(path.read_bytes())
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
