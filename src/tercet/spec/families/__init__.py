"""Families: preset sizes, config.json in and out. Adding one is one file here and one line below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tercet.errors import InputError, nearest
from tercet.spec.families import deepseek, gguf, llama, qwen, through_transformers
from tercet.spec.families.config_types import check_types
from tercet.spec.families.names import plain_names
from tercet.spec.families.safetensors_header import equal_bytes, tensor_files
from tercet.spec.families.where import is_hub_name, locate
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection

# model_type of config.json -> the module that knows it
FAMILIES: dict[str, Any] = {kind: module for module in (llama, qwen, deepseek) for kind in module.ARCHITECTURES}
_MODULES = tuple(dict.fromkeys(FAMILIES.values()))
HUB: dict[str, str] = {hub.lower(): preset for module in _MODULES for hub, preset in module.HUB.items()}


def presets() -> dict[str, Any]:
    """Return preset name -> its family module."""
    return {name: module for module in _MODULES for name in module.PRESETS}


def hub_name(name: str) -> str | None:
    """Return the hub's name, as the hub spells it, of what a preset has the sizes of; None when there is none."""
    return next((hub for module in _MODULES for hub, preset in module.HUB.items() if preset == name), None)


def preset(name: str) -> Model:
    """Return a preset's Model. Raises KeyError for a name that is none."""
    return presets()[name].build(dict(presets()[name].PRESETS[name]), name)


def read_config(path: Path) -> dict[str, Any]:
    """Return a folder's (or file's) config.json, or the config that a GGUF file's metadata amounts to.

    Raises InputError that names the file and, if broken, the line.
    """
    if path.suffix == ".gguf" and path.is_file():
        return gguf.read_config(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        return read_json_object(file)
    except FileNotFoundError:
        raise InputError(f"{path} has no config.json", "Give a Hugging Face model folder.") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the mapping that a JSON file holds. Raises InputError that names it (and the line), or FileNotFoundError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file} holds a {type(found).__name__}, not a mapping of keys to values")
    return found


def from_config(config: dict[str, Any], source: str) -> tuple[Any, dict[str, Any]]:
    """Return (family module, our sizes). Raises InputError for an unknown architecture, or missing or unknown keys."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(_unknown(config, kind, source), f"Known: {', '.join(FAMILIES)}.")
    try:
        check_types(config)
        return FAMILIES[kind], FAMILIES[kind].from_hf(config)
    except KeyError as missing:
        raise InputError(f"{source}: the key {missing} is missing") from None
    except InputError as error:
        raise InputError(f"{source}: {error.message}", error.hint) from None


# What every decoder's config says, and what says nothing about its arithmetic.
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_HARMLESS = (
    "architectures",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "model_type",
    "pretraining_tp",
    "ep_size",
    "output_router_logits",
    "task_specific_params",
)


def _unknown(config: dict[str, Any], kind: Any, source: str) -> str:
    """Return the sentence for an architecture that is not built: what is missing and what is not understood."""
    understood = {*_NEEDED, *_HARMLESS, "rope_scaling", "rope_parameters", "rope_theta", "rms_norm_eps"}
    for family, module in FAMILIES.items():
        understood |= set(module.to_hf(_smallest(family, module)))
    strange = [
        key for key in config if key not in understood and not key.endswith("_token_id") and config[key] is not None
    ]
    missing = [key for key in _NEEDED if key not in config]
    words = [f"{source}: model_type {kind!r} is not one that Tercet builds{nearest(str(kind), FAMILIES)}"]
    if missing:
        words.append(f"missing keys: {', '.join(missing)}")
    if strange:
        words.append(f"keys that no block here understands: {', '.join(strange[:12])}{', …' if strange[12:] else ''}")
    if through_transformers.in_transformers(str(kind)):
        words.append(
            "transformers has it: model.module=transformers trains it through transformers' own module (single, ddp "
            "and zero1 to zero3 only)"
        )
    return "; ".join(words)


def _smallest(family: str, module: Any) -> Model:
    sizes = {
        "family": family,
        "vocabulary": 8,
        "width": 8,
        "layers": 2,
        "heads": 2,
        "ffn": 8,
        "kv_rank": 4,
        "nope_dim": 2,
        "rope_dim": 2,
        "value_dim": 2,
        "experts": 2,
        "experts_per_token": 1,
        "expert_ffn": 4,
        "dense_layers": 1,
    }
    return module.build(sizes)


def describe(section: ModelSection) -> Model:
    """Return the Model that a recipe's model section means. Reads config.json and tensor names, never weights."""
    if section.module == "transformers":
        place = through_transformers.place_of(section)
        return through_transformers.describe(place, read_config(place), section.path or "")
    overrides = section.model_dump(exclude={"preset", "path", "init", "module"}, exclude_none=True)
    family, sizes, name = _base(section, overrides)
    _check_sizes(family, {**sizes, **overrides}, overrides)
    if section.path is None and "heads" in overrides and "kv_heads" not in overrides and sizes.get("kv_heads"):
        # A preset's grouping need not fit other heads; keep the ratio when it does, else one group a head.
        ratio = sizes["heads"] / sizes["kv_heads"]
        sizes["kv_heads"] = int(overrides["heads"] / ratio) if overrides["heads"] % ratio == 0 else overrides["heads"]
    if {"width", "heads"} & overrides.keys() and "head_dim" not in overrides:
        sizes["head_dim"] = None  # follows from width and heads again
    return family.build({**sizes, **overrides}, name)


_ONLY_WITH_EXPERTS = frozenset(
    ("experts_per_token", "shared_experts", "expert_ffn", "dense_layers", "expert_groups", "groups_per_token")
    + ("expert_scale", "normalize_experts")
)

_NONE_OF_IT = {"mtp_depth": 0, "shared_experts": 0, "dense_layers": 0}  # said of any family, and true


def _check_sizes(family: Any, sizes: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise InputError for sizes in a recipe that a model of this family has not: they would change nothing."""
    kind = sizes.get("family") or "llama"
    wrong = []
    for key in given:
        if given[key] == _NONE_OF_IT.get(key):
            continue
        if key not in family.SIZES[kind]:
            having = [name for name, module in FAMILIES.items() if key in module.SIZES[name]]
            wrong.append(f"model.{key} is not a size of the family {kind}; it is one of {', '.join(having)}")
        elif key in _ONLY_WITH_EXPERTS and not sizes.get("experts"):
            wrong.append(f"model.{key} changes nothing in a model without experts; model.experts is not given")
    if wrong:
        raise InputError("\n".join(wrong), "Take the key out, or choose a family by model.family or model.preset.")


def _base(section: ModelSection, overrides: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
    """Return (family module, sizes before the overrides, name)."""
    known = presets()
    wanted = section.preset
    if section.path is not None:
        path = locate(section.path)
        if path is not None:
            family, sizes = from_config(read_config(path), section.path)
            return family, _as_stored(path, sizes), section.path if is_hub_name(section.path) else path.stem
        if section.path.lower() not in HUB:
            raise InputError(
                f"model {section.path!r} is neither here nor known by name",
                f"Get it first: tercet fetch {section.path}. Known without a download: {', '.join(sorted(HUB))[:300]}…",
            )
        wanted = HUB[section.path.lower()]  # known by name: nothing to read, nothing to download
    if wanted is None:
        needed = ("layers", "width", "heads", "ffn", "vocabulary")
        if missing := [f"model.{key}" for key in needed if key not in overrides]:
            raise InputError(
                f"model: {', '.join(missing)} missing", "Name a preset, a folder or a hub name, or give all sizes."
            )
        wanted_family = overrides.get("family", "llama")
        return FAMILIES[wanted_family], {"family": wanted_family}, "custom"
    if wanted not in known:
        raise InputError(
            f"model: no preset {wanted!r}{nearest(wanted, known)}",
            "It is neither a preset, nor a folder with config.json, nor a hub name (owner/name).",
        )
    if overrides.get("family", known[wanted].PRESETS[wanted].get("family", "llama")) not in known[wanted].ARCHITECTURES:
        raise InputError(f"model.family is {overrides['family']!r}, which preset {wanted!r} is not of")
    return known[wanted], dict(known[wanted].PRESETS[wanted]), wanted


def _as_stored(path: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of what the folder really holds, where its config says something else.

    A config may announce multi-token prediction whose tensors are not there: transformers saves it so. And it may
    call the head tied where the files hold another one, which then counts, as for transformers.
    """
    if not path.is_dir() or not (sizes.get("mtp_depth") or sizes["tied"]):
        return sizes
    files = tensor_files(path)
    if files is None:
        return sizes
    stored = plain_names(files, path)
    embedding, head = stored.get("model.embed_tokens.weight"), stored.get("lm_head.weight")
    if sizes["tied"] and embedding and head and not equal_bytes(path, embedding, head):
        sizes = {**sizes, "tied": False}
    if sizes.get("mtp_depth") and not any(f"layers.{sizes['layers']}." in name for name in stored):
        sizes = {**sizes, "mtp_depth": 0}
    return sizes
