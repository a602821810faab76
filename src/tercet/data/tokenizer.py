"""Tokenizers: trained here, or loaded from a file, a folder, the hub or SentencePiece. All end up as one
kind.

A document is `bos? + tokens of the text + eos`. The text is encoded as text: a control token that is
spelled out in it is not taken for one. Whatever the origin, the tokenizer is saved as a Hugging Face
folder, and its tokenizer.json puts the same `bos` in front as training did.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tercet.data import hub
from tercet.data.control import BOS, EOS, PAD, require_room
from tercet.data.words import Words, is_byte_level, token_bytes, unit_pattern
from tercet.errors import InputError
from tercet.spec.families import read_json_object

# Files of a tokenizer folder that decide tokens; a model folder holds much else.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Usual spellings of the end of a text, for a bare tokenizer.json that names none.
_ENDS = (
    EOS,
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|end▁of▁sentence|>",
)
# How a GGUF file names tokenizers in which a piece that is in the vocabulary is one token, whatever the merges.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
_STARTS = (BOS, "<s>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "[BOS]")
_PADS = (PAD, "<pad>", "[PAD]", "<|pad|>", "<｜▁pad▁｜>", "<|finetune_right_pad_id|>")


@dataclass
class Tokenizer:
    """A fast tokenizer with its control tokens. `bos_id` is None when documents start without one.

    `origin`: a transformers tokenizer that knows how to save itself (chat template and all), or None.
    `template`: a chat template beside a bare tokenizer.json. `exact`: an encoder to be used for text in place of `backend` (see sentencepiece.py), or None.
    """

    backend: tokenizers.Tokenizer
    eos_id: int
    bos_id: int | None
    pad_id: int
    origin: Any = None
    exact: Any = None
    template: str | None = None

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        if self.bos_id is not None and self.backend.encode("a").ids[:1] != [self.bos_id]:
            self._add_bos(self.bos_id)

    def _add_bos(self, bos_id: int) -> None:
        token = self.backend.id_to_token(bos_id)
        start = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, bos_id)]
        )
        old = self.backend.post_processor
        self.backend.post_processor = start if old is None else processors.Sequence([old, start])

    @cached_property
    def size(self) -> int:
        """Number of ids, holes included: the highest id plus one."""
        return _size(self.backend)

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return np.uint16 if self.size <= 2**16 else np.uint32

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, control tokens left out. Runs on all cores."""
        if self.exact is not None:
            return [np.array(ids, dtype=np.uint32) for ids in self.exact.encode(texts)]
        if self._words is not None:
            return self._words.encode(texts)
        return self._encode_whole(texts)

    @property
    def by_words(self) -> bool:
        """Whether `encode` is Python that looks words up, which keeps one core busy."""
        return self.exact is None and self._words is not None

    @cached_property
    def _words(self) -> Words | None:
        pattern = unit_pattern(self.backend)
        return None if pattern is None else Words(self._encode_whole, pattern, token_bytes(self.backend))

    def _encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in found]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return (ids, character ranges) of each text; slower than `encode`, for looking closely."""
        if self.exact is not None:
            return self.exact.encode_placed(texts)
        found = self.backend.encode_batch(texts, add_special_tokens=False)
        return [(e.ids, e.offsets) for e in found]

    @property
    def before(self) -> np.ndarray:
        """The ids in front of a document."""
        return np.array([] if self.bos_id is None else [self.bos_id], dtype=np.uint32)

    @property
    def after(self) -> np.ndarray:
        """The ids that end a document."""
        return np.array([self.eos_id], dtype=np.uint32)

    def document(self, text: str) -> list[int]:
        """Return the ids of a whole document as it is trained."""
        return np.concatenate((self.before, *self.encode([text]), self.after)).tolist()

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is to be continued: begun as documents are, and not ended.

        This and `document` are the only places that put a begin token: training, evaluation, samples and generate
        ask here, so a model meets what it was trained on.
        """
        return np.concatenate((self.before, *self.encode([text]))).tolist()

    def content(self) -> str:
        """Return a hash of all that decides ids."""
        control = f"{self.bos_id} {self.eos_id} {self.pad_id} ".encode()
        return hashlib.blake2b(control + self.backend.to_str().encode(), digest_size=20).hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, control tokens spelled out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of text that an id stands for, which need be no whole character; a control token's spelling."""
        if (control := self._added.get(token_id)) is not None:
            return control.encode()
        spelled = self.backend.id_to_token(token_id) or ""
        if self._byte_of is not None:
            return bytes(self._byte_of[c] for c in spelled)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", spelled):  # SentencePiece's way to write what has no piece
            return bytes.fromhex(byte[1])
        return spelled.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> dict[int, str]:
        return {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte of each character of a spelling, as GPT-2's tokenizer fixed it: printable bytes stand for themselves,
        the others for the characters from U+0100 on; None for a tokenizer whose spellings are text."""
        if not is_byte_level(self.backend):
            return None
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in printable]
        return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder."""
        folder.mkdir(parents=True, exist_ok=True)
        spell = self.backend.id_to_token
        if self.origin is not None:
            self.origin.save_pretrained(str(folder))
            self.backend.save(str(folder / "tokenizer.json"))
            return
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **({} if self.bos_id is None else {"bos_token": spell(self.bos_id)}),
            "eos_token": spell(self.eos_id),
            "pad_token": spell(self.pad_id),
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")


# ------------------------------------------------------------------------------------------------- training


def train(texts: Iterator[str], vocabulary: int, marks: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `vocabulary` ids, trained on `texts`.

    `marks`: further control tokens. It knows every byte, so every text can be written. The same texts in the same order give the same
    tokenizer. A small text may have fewer pairs to merge than the vocabulary has room for. Raises
    InputError when the vocabulary has no room for the 256 bytes and three control tokens.
    """
    specials, alphabet = require_room(vocabulary, marks), sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    eos, bos, pad = (backend.token_to_id(token) for token in (EOS, BOS, PAD))
    assert eos is not None and pad is not None
    return Tokenizer(backend, eos, bos, pad)


# -------------------------------------------------------------------------------------------------- loading


def locate(name: str, model_tokenizer: Path | None) -> Path | str:
    """Return where data.tokenizer lies: a path, or the hub's name when nothing of that name lies here.

    Raises InputError when `model` has none, or a path that looks like one does not exist.
    """
    if name == "model":
        if model_tokenizer is None:
            raise InputError(
                "data.tokenizer is 'model', but the model brings no tokenizer",
                "Set data.tokenizer to train (one is made from data.train), a file, a folder or a hub name.",
            )
        name = str(model_tokenizer)
    path = Path(name).expanduser()
    if path.exists():
        return path
    like_a_path = path.is_absolute() or name.startswith((".", "~", "package:")) or name.count("/") > 1
    if like_a_path or path.suffix in (".json", ".model"):
        raise InputError(f"data.tokenizer: there is no file or folder {name!r}")
    return name


def content_hash(place: Path | str) -> str | None:
    """Return a hash of the files that make a local tokenizer, or None for a hub name."""
    if isinstance(place, str):
        return None
    files = [place] if place.is_file() else [place / n for n in FILES if (place / n).is_file()]
    if place.is_file():
        files += [
            f for f in (place.parent / "tokenizer_config.json",) if f.is_file() and place.name == "tokenizer.json"
        ]
    digest = hashlib.blake2b(digest_size=20)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Return the number of ids of a tokenizer.json. Raises InputError when it is none."""
    return _size(_read_json(path))


def load(place: Path | str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, a .model file, a folder or a hub name. No code of others is
    run.

    Raises InputError, which names the place and what is missing.
    """
    if isinstance(place, str):
        return _from_transformers(_from_hub(place), place)
    if place.is_dir():
        spm = [place / n for n in FILES if n.endswith(".model") and (place / n).is_file()]
        if spm and not (place / "tokenizer.json").is_file():
            return _from_sentencepiece(spm[0])
        if not any((place / n).is_file() for n in FILES):
            raise InputError(
                f"data.tokenizer: the folder {place} holds no tokenizer", f"Looked for {', '.join(FILES)}."
            )
        return _from_transformers(place, str(place))
    if place.suffix == ".model":
        return _from_sentencepiece(place)
    if place.suffix == ".gguf":
        return _from_gguf(place)
    return _from_json(place)


def _from_gguf(path: Path) -> Tokenizer:
    """Return the tokenizer inside a GGUF file; a document begins with bos only where the file says so."""
    from transformers import AutoTokenizer

    from tercet.spec.families import read_config
    from tercet.spec.families.gguf import reader

    config = read_config(path)
    try:
        found = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # every layer below raises its own kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"data.tokenizer: {path} holds no tokenizer that can be read: {first}") from None
    backend = found.backend_tokenizer
    if (pre := reader(path).fields.get("tokenizer.ggml.pre")) is not None and pre.contents() in _WHOLE_WORDS:
        backend.model.ignore_merges = True  # transformers' reader leaves it out
    count = len(reader(path).fields["tokenizer.ggml.tokens"].data)
    backend, pad = _first(backend, count), found.pad_token_id
    eos, bos = config.get("eos_token_id"), config.get("bos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    return _finish(backend, eos, bos, None if pad is not None and pad >= count else pad, str(path), found)


def _first(backend: tokenizers.Tokenizer, count: int) -> tokenizers.Tokenizer:
    """Return a tokenizer without the tokens that transformers' reader adds behind the `count` of the file (an unknown
    token, as GPT-2 has one): the model has no row for them."""
    if _size(backend) <= count:
        return backend
    whole = json.loads(backend.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < count]
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _read_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"data.tokenizer: {path} is not a tokenizer.json: {error}") from None


def _size(backend: tokenizers.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _from_json(path: Path) -> Tokenizer:
    backend = _read_json(path)
    config: dict[str, Any] = {}
    if (beside := path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
        config = read_json_object(beside)

    def named(name: str, usual: Sequence[str]) -> int | None:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        found = [text] if text else [t for t in usual if backend.token_to_id(t) is not None]
        return backend.token_to_id(found[0]) if found else None

    eos = named("eos_token", _ENDS)
    # A configuration that names no begin token means none, even if a token of a usual spelling exists.
    starts = () if config else _STARTS
    found = _finish(backend, eos, named("bos_token", starts), named("pad_token", _PADS), str(path))
    if path.name == "tokenizer.json":
        own, said = path.parent / "chat_template.jinja", config.get("chat_template")
        found.template = own.read_text(encoding="utf-8") if own.is_file() else said if isinstance(said, str) else None
    return found


def _finish(
    backend: tokenizers.Tokenizer,
    eos: int | None,
    bos: int | None,
    pad: int | None,
    name: str,
    origin: Any = None,
) -> Tokenizer:
    if eos is None:
        raise InputError(
            f"data.tokenizer: {name} names no end-of-text token, so the model could never learn to stop",
            "Put a tokenizer_config.json with eos_token beside it.",
        )
    # GPT-2's way: one token serves as both; it already closes each document, so none is put in front.
    return Tokenizer(backend, eos, None if bos == eos else bos, eos if pad is None else pad, origin)


def _from_transformers(place: Path | str, name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    for file in (
        Path(place) / "config.json",
        *(Path(place) / n for n in FILES if n.endswith(("_config.json", "_map.json"))),
    ):
        if file.is_file():  # the reader would name the folder alone
            read_json_object(file)
    try:
        found = AutoTokenizer.from_pretrained(str(place), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every layer below raises its own kinds
        first = str(error).strip().splitlines()
        raise InputError(
            f"data.tokenizer: {name} cannot be loaded: {first[0] if first else type(error).__name__}"
        ) from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"data.tokenizer: {name} has no fast tokenizer ({type(found).__name__})",
            "Give a folder with tokenizer.json or a SentencePiece .model file.",
        )
    return _finish(backend, found.eos_token_id, found.bos_token_id, found.pad_token_id, name, found)


def _from_hub(name: str) -> Path:
    """Return the local copy of a hub repository's tokenizer files, fetched if need be."""
    hint = "Give a tokenizer.json, a .model file or a folder, or train (one is made from data.train)."
    return hub.fetch(name, "data.tokenizer", [*FILES, "config.json"], "model", hint)


def _from_sentencepiece(path: Path) -> Tokenizer:
    from tercet.data.sentencepiece import convert

    found = convert(path)
    result = _finish(found.backend, found.eos_id, found.bos_id, found.pad_id, str(path))
    result.exact = found.exact
    return result
