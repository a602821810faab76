"""Control tokens of a tokenizer that is trained here, and the room they need. Loads no tokenizer: `tercet plan` asks too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tercet.errors import InputError

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
BYTES = 256
LIKE_A_TOKEN = re.compile(r"<[|｜][^\s|｜<>'\"]+[|｜]>")


def templates() -> dict[str, Path]:
    """Return name -> file of the chat templates that come with the package."""
    folder = Path(str(resources.files("tercet.data") / "templates"))
    return {p.stem: p for p in sorted(folder.glob("*.jinja"))}


def tokens_of(setting: str | None) -> list[str]:
    """Return the control tokens that the template of data.template writes: those that its first line lists, as
    `{# <|turn|> <|end|> -#}`, else those that it spells <|…|>. None for no template, or a file that is not there."""
    path = templates().get(setting or "", Path(setting or ""))
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0].strip()
    if listed := re.fullmatch(r"\{#-?\s*(.*?)\s*-?#\}", first):
        return listed[1].split()
    return list(dict.fromkeys(LIKE_A_TOKEN.findall(text)))


def require_room(vocabulary: int, marks: Sequence[str] = ()) -> list[str]:
    """Return the control tokens of a tokenizer trained here, `marks` among them. Raises InputError where `vocabulary` ids
    do not do for them and the bytes."""
    specials = list(dict.fromkeys([BOS, EOS, PAD, *marks]))
    if vocabulary < (least := BYTES + len(specials)):
        raise InputError(
            f"model.vocabulary is {vocabulary}; a tokenizer trained here needs at least {least}",
            f"{BYTES} for the bytes and {len(specials)} control tokens.",
        )
    return specials
