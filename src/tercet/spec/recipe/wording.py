"""How a fault in a recipe is told: the file and line, the key, the value seen, what is allowed, the nearest name."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from tercet.errors import nearest
from tercet.spec.recipe.sections import Recipe, Section, SourceSection


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the Section class inside an annotation (Optional, list and Annotated looked through)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Annotated, Union, UnionType, list):
        for inner in get_args(annotation):
            if found := _section_of(inner):
                return found
    return None


@cache
def _all_keys() -> dict[str, list[str]]:
    """Return last part -> dotted keys, over the whole recipe."""
    found: dict[str, list[str]] = {}

    def walk(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            found.setdefault(name, []).append(prefix + name)
            inner = _section_of(field.annotation)
            if inner is not None and inner is not SourceSection:
                walk(inner, f"{prefix}{name}.")

    walk(Recipe, "")
    return found


def section_names() -> list[str]:
    return [n for n, f in Recipe.model_fields.items() if _section_of(f.annotation)]


def explain(error: ValidationError, lines: dict[str, str]) -> list[str]:
    """Return one sentence per fault: where, key, value seen, what is allowed."""
    sentences: dict[str, str] = {}
    for fault in error.errors():
        # A union adds its branches' names to the path; only parts that are keys or indices belong to the user's key.
        parts = _key_parts(fault["loc"])
        key = ".".join(parts)
        where = place_of(parts, lines)
        prefix = f"{where}: " if where else ""
        sentence = prefix + _sentence(fault, key, parts)
        if key not in sentences:
            sentences[key] = sentence
        elif fault["type"] not in ("extra_forbidden",) and sentence not in sentences[key]:
            # Branches of one union: say all that would be allowed, once.
            allowed = sentence.rpartition("; it ")[2]
            if "; it " in sentence and allowed not in sentences[key]:
                sentences[key] += f", or {allowed}"
    return list(sentences.values())


def place_of(parts: list[str], lines: dict[str, str]) -> str:
    """Return where a key came from: its own place, that of something below it, that of its section, or the file."""
    key = ".".join(parts)
    if key in lines:
        return lines[key]
    below = next((place for k, place in lines.items() if k.startswith(f"{key}.")), None)
    above = (lines[k] for k in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if k in lines)
    return below or next(above, lines.get("", ""))


def _key_parts(location: tuple[str | int, ...]) -> list[str]:
    parts: list[str] = []
    section: type[Section] | None = Recipe
    for step in location:
        if isinstance(step, int):
            parts.append(str(step))
        elif section is not None and step in section.model_fields:
            parts.append(step)
            section = _section_of(section.model_fields[step].annotation)
        elif (
            section is not None
            and not any(c in step for c in "[]()")
            and step not in _TYPE_NAMES
            and not step.startswith("constrained-")
        ):
            parts.append(step)  # an unknown key
    return parts


_TYPE_NAMES = frozenset(("int", "float", "str", "bool", "list", "dict", "literal"))
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "at most"),
}


def _sentence(fault: Any, key: str, parts: list[str]) -> str:
    kind, value, context = fault["type"], fault.get("input"), fault.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(parts)
    if kind == "missing":
        return f"{key} is missing"
    if value is None and kind.endswith("_type"):
        return f"{key} is empty"
    if kind in _BOUNDS:
        return f"{key} is {value}; it must be {_range(parts) or f'{_BOUNDS[kind][1]} {context[_BOUNDS[kind][0]]}'}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key} is {value!r}{nearest(str(value), choices)}; it must be one of {', '.join(choices)}"
    if kind == "value_error":
        return f"{key}: {context['error']!s}" if key else str(context["error"])
    what = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "int_type": "a whole number",
        "float_parsing": "a number",
        "float_type": "a number",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "string_type": "a text",
        "list_type": "a text or a list",
        "too_short": "a list that is not empty",
    }.get(kind)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        section = _section_of(Recipe.model_fields[parts[0]].annotation) if parts else Recipe
        names = ", ".join(section.model_fields) if section else ""
        return f"{key} is {value!r}; it must be a section with the keys {names}"
    return f"{key} is {value!r}; it must be {what}" if what else f"{key} is {value!r}: {fault['msg']}"


def _range(parts: list[str]) -> str:
    """Return the declared range of a key, as "at least 0 and less than 1"."""
    section: type[Section] | None = Recipe
    field = None
    for part in parts:
        if section is None or part not in section.model_fields:
            continue
        field = section.model_fields[part]
        section = _section_of(field.annotation)
    found: dict[str, Any] = {}

    def walk(item: Any) -> None:
        for bound in ("gt", "ge", "lt", "le"):
            if getattr(item, bound, None) is not None:
                found[bound] = getattr(item, bound)
        for inner in (*getattr(item, "metadata", ()), *(get_args(item) if get_origin(item) else ())):
            walk(inner)

    if field is not None:
        walk(field.annotation)
        for item in field.metadata:
            walk(item)
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[b]} {found[b]}" for b in ("gt", "ge", "lt", "le") if b in found)


def _unknown_key(parts: list[str]) -> str:
    """Return "unknown key optim.learning_rte; did you mean optim.lr?", looking in every section."""
    key, last, prefix = ".".join(parts), parts[-1], ".".join(parts[:-1])
    keys = _all_keys()
    aliases = {
        "learning_rate": "lr",
        "batch_size": "batch_sequences",
        "max_steps": "steps",
        "num_epochs": "epochs",
        "max_seq_length": "sequence_tokens",
        "cutoff_len": "sequence_tokens",
        "sequence_length": "sequence_tokens",
        "per_device_train_batch_size": "micro_batch",
        "gradient_checkpointing": "recompute",
        "max_grad_norm": "clip",
        "lr_scheduler_type": "schedule",
        "bf16": "precision",
        "fp16": "precision",
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn",
        "vocab_size": "vocabulary",
        "output_dir": "folder",
        "save_steps": "checkpoint_every",
        "eval_steps": "evaluate_every",
        "gradient_accumulation_steps": "batch_sequences",
        "num_train_epochs": "epochs",
    }
    folded = last.replace("-", "_").lower()
    found: dict[str, float] = {f"{prefix}.{name}": _likeness(folded, name) for name in _names_beside(parts)}
    for name in (*keys, *aliases):
        for full in keys.get(name, []) or keys.get(aliases.get(name, ""), []):
            found[full] = max(found.get(full, 0.0), _likeness(folded, name))
    # The user's own section is where the slip most probably is, unless another has a nearer name.
    near = sorted(
        (full for full, like in found.items() if like >= 0.6),
        key=lambda full: (-found[full], full.rpartition(".")[0] != prefix),
    )
    if near and near[0].rpartition(".")[0] == prefix:
        near = [full for full in near if full.rpartition(".")[0] == prefix]
    proposal = f"; did you mean {', '.join(near[:3])}?" if near else ""
    return f"unknown key {key}{proposal}"


def _names_beside(parts: list[str]) -> list[str]:
    """Return the names of the section that a key stands in, entries of a list included."""
    section: type[Section] | None = Recipe
    for part in parts[:-1]:
        if section is not None and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation)
        elif not part.isdecimal():
            return []
    return list(section.model_fields) if section is not None else []


def _likeness(given: str, name: str) -> float:
    return SequenceMatcher(None, name, given).ratio()
