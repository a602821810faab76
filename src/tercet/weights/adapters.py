"""Adapters in and out, in peft's format: a folder with adapter_config.json and adapter_model.safetensors.

Read, an adapter is its base's weights with the products added: in fp32, once, tensor by tensor, into the base as it is
stored, never into a quantised copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.errors import InputError, listed
from tercet.model.adapter import adapted_modules, lora_config
from tercet.spec.adapter import module_of
from tercet.spec.families import describe, read_json_object
from tercet.spec.families.where import locate
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection
from tercet.weights.safetensors_file import SafetensorsFile
from tercet.weights.stored import EMBEDDING, HEAD, Stored
from tercet.weights.writing import copy_tokenizer, save_tensors

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def save_adapter(
    folder: Path,
    spec: Model,
    tensors: Iterable[tuple[str, Tensor]],
    base: str,
    tokenizer_folder: Path | None = None,
) -> None:
    """Write what was trained, fp32, as `peft.PeftModel.from_pretrained` reads it. `base`: what it stands on.

    Raises InputError when a trained tensor is missing, empty or of another shape: nothing half is ever written.
    """
    assert spec.adapter is not None
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {t.name: t.shape for t in spec.tensors() if spec.trains(t)}
    found = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in tensors if name in wanted}
    if missing := wanted.keys() - found.keys():
        raise InputError(f"cannot save the adapter: no value for {listed(missing)}")
    for name, value in found.items():
        if tuple(value.shape) != wanted[name]:  # a sharded parameter that nobody gathered is empty
            raise InputError(f"cannot save the adapter: {name} has shape {tuple(value.shape)}, expected {wanted[name]}")
    save_tensors(folder / WEIGHTS, {PREFIX + name: value.clone() for name, value in found.items()})
    place = Path(base).expanduser()
    config = lora_config(
        spec.adapter,
        target_names(spec),
        base_model_name_or_path=str(place.absolute()) if place.exists() else base,
        task_type="CAUSAL_LM",
        inference_mode=True,
        modules_to_save=list(spec.adapter.modules_to_save) or None,
    )
    config.save_pretrained(str(folder))
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)


def target_names(spec: Model) -> list[str]:
    """Return `target_modules`: the last words of the adapted modules' names where these say it all, else whole names."""
    names = adapted_modules(spec)
    ends = sorted({name.rpartition(".")[2] for name in names})
    meant = [module_of(t) for t in spec.tensors() if t.kind in ("matrix", "head")]
    same = [name for name in meant if name.rpartition(".")[2] in ends] == names
    return ends if same else names


# -------------------------------------------------------------------------------------------------------- reading


def is_adapter(place: Path) -> bool:
    return (place / CONFIG).is_file()


def base_of(place: Path) -> Path:
    """Return where the base of an adapter's folder lies, and any other place itself. Raises InputError when it is not
    here.
    """
    if not is_adapter(place):
        return place
    name = read_json_object(place / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{place / CONFIG} does not say which model the adapter stands on (base_model_name_or_path)")
    try:
        found = locate(name)
    except InputError:
        raise InputError(
            f"{place} is an adapter of {name}, which is not here", f"Put it there, or change {place / CONFIG}."
        ) from None
    if found is None:
        raise InputError(f"{place} is an adapter of {name}, which is not here", f"Get it first: tercet fetch {name}")
    return found


def describe_place(place: Path) -> Model:
    """Return the Model of a folder or file; of an adapter's folder its base's, with as many words as the adapter has."""
    described = describe(ModelSection(path=str(base_of(place))))
    words = _words_of(place) if is_adapter(place) else None
    if words is None or words <= described.vocabulary:
        return described
    return describe(ModelSection(path=str(base_of(place)), vocabulary=words))


def _words_of(place: Path) -> int | None:
    """Return the size of the vocabulary that an adapter brings whole (modules_to_save), None when it brings none."""
    file = SafetensorsFile(place / WEIGHTS)
    whole = (f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight")
    return next((file.shape(name)[0] for name in whole if name in file.names()), None)


@dataclass(frozen=True)
class Product:
    """What is added to one weight: scaling times B A, both fp32."""

    a: Tensor
    b: Tensor
    scaling: float

    def rows(self, begin: int, end: int) -> Tensor:
        return self.scaling * (self.b[begin:end] @ self.a)


class Merged:
    """The base's tensors with an adapter added, read like Stored's. Raises InputError for what it cannot add."""

    def __init__(self, place: Path, base: Stored):
        self.base, self.spec = base, base.spec
        config = read_json_object(place / CONFIG)
        _check(config, place)
        file = SafetensorsFile(place / WEIGHTS)
        self._products: dict[str, Product] = {}
        self._instead: dict[str, Tensor] = {}
        shapes = {t.name: t.shape for t in self.spec.tensors()}
        read = {name: file.rows(name, 0, file.shape(name)[0]).float() for name in file.names()}
        unknown = set(read)
        for name, shape in shapes.items():
            module = PREFIX + name.removesuffix(".weight")
            pair = [f"{module}.lora_{half}.weight" for half in "AB"]
            if pair[0] in read and pair[1] in read:
                a, b = (read[key] for key in pair)
                if (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1]:
                    raise InputError(f"{place}: the adapter of {name} is {b.shape} x {a.shape}, expected {shape}")
                rank = a.shape[0]
                root = rank**0.5 if config.get("use_rslora") else rank
                self._products[name] = Product(a, b, config["lora_alpha"] / root)
                unknown -= set(pair)
            elif (whole := read.get(PREFIX + name)) is not None:
                if tuple(whole.shape) != shape:
                    raise InputError(f"{place}: {name} has shape {tuple(whole.shape)}, expected {shape}")
                self._instead[name] = whole
                unknown.discard(PREFIX + name)
        if self.spec.tied and (tables := {EMBEDDING, HEAD} & {name.removeprefix(PREFIX) for name in read}):
            raise InputError(
                f"{place}: the adapter brings {' and '.join(sorted(tables))} whole, and its base ({base.files.where}) has one "
                "table for both embedding and head; peft changes one of the two and leaves the other, which no such model "
                "can hold",
                "Save the base with a head of its own (tie_word_embeddings: false) and train or merge on that.",
            )
        if unknown or not read:
            what = f"holds {listed(unknown)}, which its base has no place for" if unknown else "holds nothing"
            raise InputError(f"{place / WEIGHTS} {what}", "Is base_model_name_or_path the model it was trained on?")

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor: fp32 where the adapter changes it, as the base stores it elsewhere."""
        value = self._instead.get(name)
        return self._added(name, self.base.tensor(name), 0) if value is None else value

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        value = self._instead.get(name)
        return self._added(name, self.base.rows(name, begin, end), begin) if value is None else value[begin:end]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.base:
            yield name, self._instead.get(name, self._added(name, value, 0))

    def apart(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Product]]:
        """Return (the weights without the products, module name -> its product)."""
        products = {name.removesuffix(".weight"): product for name, product in self._products.items()}
        return ((name, self._instead.get(name, value)) for name, value in self.base), products

    def _added(self, name: str, value: Tensor, begin: int) -> Tensor:
        product = self._products.get(name)
        return value if product is None else value.float() + product.rows(begin, begin + value.shape[0])


def _check(config: dict[str, Any], place: Path) -> None:
    wrong = {
        "peft_type": config.get("peft_type") != "LORA",
        "lora_alpha": not isinstance(config.get("lora_alpha"), int | float),
        **{key: bool(config.get(key)) for key in ("use_dora", "alpha_pattern", "fan_in_fan_out", "lora_bias")},
        "bias": config.get("bias", "none") != "none",
    }
    if bad := [key for key, is_wrong in wrong.items() if is_wrong]:
        said = ", ".join(f"{key}={json.dumps(config.get(key))}" for key in bad)
        raise InputError(f"{place / CONFIG}: {said} is not understood here", "Merge it with peft: merge_and_unload().")
