"""Chats as the model was trained to read them: the template that lies with the tokenizer, in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tercet.errors import InputError
from tercet.spec.families import read_json_object
from tercet.spec.families.gguf import reader

Messages = Sequence[Mapping[str, Any]]


def find_template(folder: Path) -> str | None:
    """Return a folder's chat template: chat_template.jinja, or the entry in tokenizer_config.json; None without one."""
    if folder.is_dir():
        if (file := folder / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (folder / name).is_file() and (found := read_json_object(folder / name).get("chat_template")):
                return _default(found)
    elif folder.suffix == ".gguf":
        field = reader(folder).fields.get("tokenizer.chat_template")
        return None if field is None else str(field.contents())
    return None


def _default(found: Any) -> str | None:
    """Return the template, or of several named ones the one called default."""
    if isinstance(found, list):
        return next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def render(template: str, messages: Messages, special: Mapping[str, Any], tools: Sequence[Any] | None = None) -> str:
    """Return the text of a chat up to where the answer begins. `special`: bos_token, eos_token, … by name.

    Raises InputError when the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            conversations=[[dict(m) for m in messages]],
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=True,
            **special,
        )
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from None
    return texts[0]
