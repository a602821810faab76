"""Families: preset sizes, config.json in and out. Adding one is one file here and one line below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tercet.errors import InputError, nearest
from tercet.spec.families import llama
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection

FAMILIES = {family.MODEL_TYPE: family for family in (llama,)}


def presets() -> dict[str, Any]:
    """Return preset name -> its family module."""
    return {name: family for family in FAMILIES.values() for name in family.PRESETS}


def read_config(path: Path) -> dict[str, Any]:
    """Return a folder's (or file's) config.json. Raises InputError that names the file and, if broken, the line."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} has no config.json", "Give a Hugging Face model folder.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from None


def from_config(config: dict[str, Any], source: str) -> tuple[Any, dict[str, Any]]:
    """Return (family module, our sizes). Raises InputError for an unknown architecture or missing keys."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{source}: model_type {kind!r} is not one that Tercet builds{nearest(str(kind), FAMILIES)}",
            f"Known: {', '.join(FAMILIES)}.",
        )
    try:
        return FAMILIES[kind], FAMILIES[kind].from_hf(config)
    except KeyError as missing:
        raise InputError(f"{source}: the key {missing} is missing") from None


def describe(section: ModelSection) -> Model:
    """Return the Model that a recipe's model section means. Reads config.json at most, never weights."""
    overrides = section.model_dump(exclude={"preset", "path", "init"}, exclude_none=True)
    if section.path is not None:
        family, sizes = from_config(read_config(Path(section.path).expanduser()), section.path)
        name = Path(section.path).name
    elif section.preset is not None:
        known = presets()
        if section.preset not in known:
            raise InputError(
                f"model: no preset {section.preset!r}{nearest(section.preset, known)}",
                "It is neither a preset, nor a folder with config.json, nor a hub name (owner/name).",
            )
        family, name = known[section.preset], section.preset
        sizes = dict(family.PRESETS[section.preset])
    else:
        family, sizes, name = llama, {}, "custom"
        needed = ("layers", "width", "heads", "ffn", "vocabulary")
        if missing := [f"model.{key}" for key in needed if key not in overrides]:
            raise InputError(
                f"model: {', '.join(missing)} missing", "Name a preset, a folder or a hub name, or give all sizes."
            )
    if section.path is None and "heads" in overrides and "kv_heads" not in overrides and sizes.get("kv_heads"):
        # A preset's grouping need not fit other heads; keep the ratio when it does, else one group a head.
        ratio = sizes["heads"] / sizes["kv_heads"]
        sizes["kv_heads"] = int(overrides["heads"] / ratio) if overrides["heads"] % ratio == 0 else overrides["heads"]
    if {"width", "heads"} & overrides.keys() and "head_dim" not in overrides:
        sizes["head_dim"] = None  # follows from width and heads again
    return family.build({**sizes, **overrides}, name)
