"""Layouts of chats in a row, one module each. A module here is a layout; nothing else needs to be told.

Every module has
`COLUMNS`: our names of the columns that it reads, which a `map` may name; the first ones, `NEEDED`, must be there,
`sniff(row) -> bool`: whether a row (an object, columns already under our names) has this layout, and
`read(row, names) -> Chat`: the chat. `names`: how the file calls what a turn has (role, content), from `map`.
`read` raises UnusableRow.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

from tercet.data.chat import ROLES, Chat, checked

TURNS = ("role", "content")  # what a `map` may name inside a turn
# Pairs of columns that are usually a question and its answer, for the mapping that would read them.
_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem", "user", "human", "context", "q")
_CONTEXTS = ("context", "input", "passage", "background", "document")  # what a question is asked about
_ANSWERS = ("answer", "response", "completion", "output", "solution", "reply", "assistant", "gpt", "target", "a")


@cache
def layouts() -> dict[str, ModuleType]:
    """Return name -> module of every layout."""
    return {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}


@cache
def columns() -> tuple[str, ...]:
    """Return every name that a `map` may give."""
    return tuple(dict.fromkeys(("text", *(c for m in layouts().values() for c in m.COLUMNS), *TURNS)))


def messages_aliases() -> tuple[str, ...]:
    """Return every name of a column that may hold the turns."""
    return layouts()["messages"].ALIASES


def layout_of(row: Mapping[str, Any]) -> str | None:
    """Return the name of the layout that a row shows, or None."""
    return next((name for name, module in layouts().items() if module.sniff(row)), None)


def read(layout: str, row: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
    """Return the chat of a row. Raises UnusableRow."""
    module = layouts()[layout]
    return checked(module.read(row, names), module.NEEDED[0], module.NEEDED[-1])


def mapping_for(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the mapping that would read a row of questions and answers, or None."""
    texts = {str(k).lower(): str(k) for k, v in row.items() if isinstance(v, str) and v.strip()}
    lists = [str(k) for k, v in row.items() if isinstance(v, list) and v and isinstance(v[0], dict)]
    if lists and (turn := _turn_names(row[lists[0]])):
        return {"messages": lists[0], **turn}
    question = next((texts[q] for q in _QUESTIONS if q in texts), None)
    answer = next((texts[a] for a in _ANSWERS if a in texts and texts[a] != question), None)
    if not question or not answer:
        return None
    beside = next((texts[c] for c in _CONTEXTS if c in texts and texts[c] not in (question, answer)), None)
    if beside or question.lower() == "instruction" or row.get("history"):  # Alpaca's layout reads these
        return {"instruction": question, **({"input": beside} if beside else {}), "output": answer}
    return {"prompt": question, "completion": answer}


def flow(mapping: Mapping[str, str]) -> str:
    """Return a mapping as a recipe has it in one line: {prompt: question, completion: answer}."""

    def word(text: str) -> str:
        # A JSON string is a YAML string; a plain word reads as itself.
        return (
            text
            if re.fullmatch(r"(?!null$)[A-Za-z_][\w.-]*", text, re.IGNORECASE)
            else json.dumps(text, ensure_ascii=False)
        )

    return f"{{{', '.join(f'{ours}: {word(theirs)}' for ours, theirs in mapping.items())}}}"


def _turn_names(turns: list[Any]) -> dict[str, str]:
    """Return what a map must say of the turns' names, nothing when it cannot be told: by usual names, else the role is
    the text that is a role we know in every turn, and the content the longest of the others."""
    turns = [turn for turn in turns if isinstance(turn, dict)]
    texts = {k: [t[k] for t in turns] for k in turns[0] if all(isinstance(t.get(k), str) for t in turns)}
    roles = [k for k, said in texts.items() if all(text.strip().lower() in ROLES for text in said)]
    role = next((k for k in ("role", "from", "speaker", "author", "sender", *roles) if k in texts), None)
    usual = ("content", "value", "text", "message", "utterance", "body")
    by_length = sorted((k for k in texts if k != role), key=lambda k: -sum(map(len, texts[k])))
    content = next((k for k in (*usual, *by_length) if k in texts), None)
    return {"role": role, "content": content} if role and content else {}
