"""A tokenizer with ChatML's tokens, and chats, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tercet.data import tokenizer
from tercet.data.chat import Chat
from tercet.data.control import templates
from tercet.data.masks import Masked, Masker
from tercet.data.prepare import Prepared
from tercet.data.shards import Palette
from tercet.data.spans import Template
from tercet.data.tokenizer import Tokenizer
from tests.texts import made, sentence

MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")  # fmt: skip


def words(bos: bool = False) -> Tokenizer:
    """A byte-level tokenizer that knows the marks of every template of ours."""
    made = tokenizer.train((sentence(n) for n in range(40)), 420, MARKS)
    return made if bos else Tokenizer(made.backend, made.eos_id, None, made.pad_id)


def folder(place: Path, bos: bool = False) -> str:
    words(bos).save(place)
    if not bos:
        config = json.loads((place / "tokenizer_config.json").read_text())
        config.pop("bos_token", None)
        (place / "tokenizer_config.json").write_text(json.dumps(config))
    return str(place)


def template(name: str = "chatml", train_on: str = "assistant", bos: bool = False) -> Template:
    source = templates()[name].read_text(encoding="utf-8").partition("\n")[2] if name in templates() else name
    return Template(name if name in templates() else "own", source, words(bos), train_on)


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    found = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *found] if system else found


def masked(
    made: Template, messages: list[dict[str, Any]], weight: float = 1.0, tools: list[Any] | None = None
) -> list[Masked]:
    masker = Masker(made.tokenizer, made, Palette())
    documents = made.documents(Chat(messages, tools or [], weight))
    return list(masker.encode((d, None) for d in documents))


def shown(made: Template, found: Masked) -> str:
    """The document as text, trained parts within [ ]."""
    out, open_ = "", False
    for i, t in zip(found.ids.tolist(), found.trained.tolist(), strict=True):
        if bool(t) != open_:
            out, open_ = out + ("[" if t else "]"), bool(t)
        out += made.tokenizer.decode([i])
    return out + ("]" if open_ else "")


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def prepared(place: Path, rows: Iterable[Any], **keys: Any) -> Prepared:
    """Prepare rows under the tiny tokenizer and ChatML."""
    if not (place / "words").exists():
        folder(place / "words")
    path = write(place / "rows.jsonl", rows)
    defaults = {"tokenizer": str(place / "words"), "template": "chatml", "sequence_tokens": 128, "long_rows": "drop"}
    return made(place, path, vocabulary=None, **{**defaults, **keys})  # type: ignore[arg-type]
