"""Chat templates: the tokenizer's own, or one of ours by name; rendered in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tercet.data.control import templates
from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError, nearest
from tercet.spec.families import read_json_object
from tercet.spec.families.gguf import reader

Messages = Sequence[Mapping[str, Any]]


def source_of(setting: str | None, folder: Path) -> tuple[str, str]:
    """Return (name, Jinja source) of data.template; without a setting that of the tokenizer in `folder`.

    Raises InputError when there is none.
    """
    if setting is None:
        found = find_template(folder)
        if found is None:
            raise InputError(
                "the data holds chats, but the tokenizer brings no chat template",
                f"Name one with data.template=NAME: {', '.join(templates())}, or a .jinja file; plain writes the texts as they are.",
            )
        return "the tokenizer's own", found
    if setting in templates():
        text = templates()[setting].read_text(encoding="utf-8")
        return setting, text.partition("\n")[2]
    path = Path(setting).expanduser()
    if path.is_file():
        return str(path), path.read_text(encoding="utf-8")
    raise InputError(
        f"data.template: {setting!r} is no template{nearest(setting, templates())}",
        f"Known: {', '.join(templates())}; or give a .jinja file.",
    )


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


def render(
    template: str,
    messages: Messages,
    special: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
    opening: bool = True,
    more: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a chat, with `opening` up to where the answer begins. `special`: bos_token, … by name. `more`:
    what else the template is told, such as enable_thinking.

    Raises InputError when the template refuses the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            conversations=[[dict(m) for m in messages]],
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=opening,
            **{**(more or {}), **special},
        )
    except Exception as error:  # the template is a program that came with the model, on messages of strangers
        raise InputError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from None
    return texts[0]


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return bos_token, eos_token and pad_token as templates want them; a tokenizer without bos gives none."""
    spell = tokenizer.backend.id_to_token
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    return {name: spell(i) for name, i in ids.items() if i is not None}
