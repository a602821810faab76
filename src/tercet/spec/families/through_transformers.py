"""Architectures that Tercet has not: described by their files, computed by transformers' own module.

Tensors are exact, since the files' headers name them. What a layer computes and keeps is not known without running
it: for the planner each layer is taken as a Llama layer of the config's sizes. Loads neither torch nor transformers.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from tercet.errors import InputError
from tercet.spec.blocks.cost import Matmul
from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.families.names import plain_names
from tercet.spec.families.safetensors_header import SINGLE, read_header, tensor_files
from tercet.spec.families.where import is_hub_name, locate
from tercet.spec.model import Layer, Model, Tensor
from tercet.spec.recipe import ModelSection

ESTIMATED = (
    "model.module=transformers: activations, logits and time are estimates for a module that is not ours (taken as "
    "Llama-shaped layers of its config's sizes); weights, gradients and optimizer follow from its tensors"
)
SAVE_WITH_IT = "AutoModelForCausalLM.{0}.save_pretrained(FOLDER)"
_FLOATS = ("F64", "F32", "F16", "BF16")
_TABLES = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")  # of old files; no parameters
_NUMBER = re.compile(r"^(.*?\.)(\d+)\.")


@dataclass(frozen=True)
class TransformersLayer(Layer):
    """A layer by its own tensors, named without the layer's prefix. The two blocks are estimates."""

    own: tuple[Tensor, ...] = ()

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return tuple(replace(t, name=prefix + t.name) for t in self.own)

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        matrices = [t for t in self.own if len(t.shape) > 1]
        return tuple(Matmul(t.name, t.shape[-1], t.parameters // t.shape[-1]) for t in matrices)

    def flops(self, width: int, tokens: int, context: float) -> int:
        scores, values = self.attention.attention_widths
        return int(tokens * sum(m.flops for m in self.matmuls(width)) + 2 * tokens * context * (scores + values))


@dataclass(frozen=True)
class TransformersModel(Model):
    """A model that transformers' module of its `config` computes. Layer n's names begin with `prefix` and n."""

    module: ClassVar[str] = "transformers"

    prefix: str = ""
    outside: tuple[Tensor, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    def blocks(self):
        for n, layer in enumerate(self.layers):
            yield f"{self.prefix}{n}.", layer

    def tensors(self) -> tuple[Tensor, ...]:
        inside = [t for prefix, layer in self.blocks() for t in layer.tensors(prefix, self.width)]
        return (*inside, *self.outside)


@cache
def in_transformers(kind: str) -> bool:
    """Whether the installed transformers has a causal language model of a model_type.

    Reads its table of names as text: importing it would load torch, and take seconds.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return False
    table = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    if not table.is_file():
        return False
    for statement in ast.parse(table.read_text(encoding="utf-8")).body:
        names = [t.id for t in getattr(statement, "targets", ()) if isinstance(t, ast.Name)]
        if names == ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]:
            pairs = (node for node in ast.walk(statement) if isinstance(node, ast.Tuple) and node.elts)
            return any(isinstance(pair.elts[0], ast.Constant) and pair.elts[0].value == kind for pair in pairs)
    return False


def place_of(section: ModelSection) -> Path:
    """Return the folder of a section with module: transformers. Raises InputError for what that cannot do."""
    name = section.path
    if name is None:
        raise InputError(
            "model.module is transformers, which needs a model.path", "Give a Hugging Face folder or a hub name."
        )
    given = section.model_dump(exclude={"path", "init", "module"}, exclude_none=True)
    if given:
        raise InputError(
            f"model.module is transformers, which takes all sizes from the config.json of {name}; "
            f"{', '.join(f'model.{key}' for key in given)} cannot be set"
        )
    if section.init == "random":
        start = SAVE_WITH_IT.format("from_config(AutoConfig.from_pretrained(PATH))")
        raise InputError(
            "model.init=random is not built for model.module=transformers",
            f"Save the architecture's own random start once, and give that folder: {start}",
        )
    place = locate(name)
    if place is None:
        raise InputError(f"model {name!r} is not here", f"Get it first: tercet fetch {name}.")
    if place.suffix == ".gguf":
        raise InputError(f"{name}: model.module=transformers reads Hugging Face folders, not GGUF files")
    return place


def describe(place: Path, config: dict[str, Any], name: str) -> TransformersModel:
    """Return the Model of a folder: sizes by its config.json, tensors by the headers of its safetensors.

    Raises InputError when transformers has no such architecture, or for a file or a key that is missing.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not in_transformers(kind):
        raise InputError(f"{name}: the installed transformers has no causal language model of model_type {kind!r}")
    if config.get("quantization_config"):
        raise InputError(f"{name}: quantised weights (quantization_config) are not built for model.module=transformers")
    tensors, unread = [], []
    for key, (dtype, shape) in headers(place).items():
        if dtype not in _FLOATS or not shape or _TABLES.search(key):
            unread.append(key)
        else:
            tensors.append(Tensor(key, shape, _axes(shape), _kind(key, shape, config.get("vocab_size"))))
    head = [t.name for t in tensors if t.kind == "head"]
    if config.get("tie_word_embeddings") and head:  # old files hold a tied head twice
        tensors = [t for t in tensors if t.kind != "head"]
        unread += head
    return build(config, tensors, name if is_hub_name(name) else place.name, tuple(unread))


def build(
    config: dict[str, Any], tensors: Iterable[Tensor], name: str, unread: tuple[str, ...] = ()
) -> TransformersModel:
    """Return the Model around tensors, whose names say which layer they belong to."""
    tensors = list(tensors)
    numbered: dict[str, dict[int, list[Tensor]]] = {}
    for t in tensors:
        if found := _NUMBER.match(t.name):
            prefix, n = found[1], int(found[2])
            inner = replace(t, name=t.name.removeprefix(f"{prefix}{n}."))
            numbered.setdefault(prefix, {}).setdefault(n, []).append(inner)
    tables = [t for t in tensors if t.kind == "embedding"]
    if not numbered or not tables:
        missing = "vocab_size" if "vocab_size" not in config else "an embedding and numbered layers"
        raise InputError(f"{name}: {missing} was not found; models of text with layers alike are built")
    prefix = max(numbered, key=lambda p: sum(t.parameters for layer in numbered[p].values() for t in layer))
    layers, width = numbered[prefix], tables[0].shape[1]
    if sorted(layers) != list(range(len(layers))):
        raise InputError(f"{name}: the layers {prefix}* are not numbered from 0 without a gap")
    own = [tuple(sorted(layers[n], key=lambda t: t.name)) for n in range(len(layers))]
    heads = _size(config, "num_attention_heads", "n_head", "n_heads") or max(1, width // 64)
    head_dim = _size(config, "head_dim") or max(1, width // heads)
    attention = GQA(heads, _size(config, "num_key_value_heads") or heads, head_dim)
    sides = [side for t in own[0] if len(t.shape) > 1 for side in t.shape]
    feedforward = SwiGLU(_size(config, "intermediate_size", "n_inner", "ffn_dim") or max(sides, default=width))
    inside = {f"{prefix}{n}.{t.name}" for n, layer in layers.items() for t in layer}
    return TransformersModel(
        family=config["model_type"],
        name=name,
        vocabulary=tables[0].shape[0],
        width=width,
        layers=tuple(TransformersLayer(attention, feedforward, tensors) for tensors in own),
        tied=not any(t.kind == "head" for t in tensors),
        context_tokens=_size(config, "max_position_embeddings", "n_positions", "max_seq_len") or 2048,
        unread=unread,
        prefix=prefix,
        outside=tuple(t for t in tensors if t.name not in inside),
        config=config,
    )


def _size(config: dict[str, Any], *keys: str) -> int | None:
    """Return the first of these keys that holds a whole number: some configs hold one number a layer."""
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _axes(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("rows", "columns", "depth", "more")[: len(shape)]


def _kind(name: str, shape: tuple[int, ...], vocabulary: Any) -> str:
    """Return what decides weight decay: one dimension is a norm or a bias; tables of the vocabulary by their name."""
    if len(shape) == 1:
        return "bias" if name.endswith("bias") else "norm"
    if shape[0] != vocabulary or _NUMBER.match(name):
        return "matrix"
    return "head" if re.search(r"(^|\.)(lm_head|embed_out|output|head)\.", name) else "embedding"


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name (without wrappers' prefixes) -> (type, shape) of every tensor in a folder's safetensors.

    Reads no tensor. Raises InputError for a file that is missing or broken.
    """
    files = tensor_files(folder)
    if files is None:
        again = SAVE_WITH_IT.format("from_config(AutoConfig.from_pretrained(PATH))")
        raise InputError(
            f"{folder} has no {SINGLE}; model.module=transformers learns names and shapes from safetensors",
            f"For a random start, save one and give that folder: {again}",
        )
    entries = {name: entry for file in sorted(set(files.values())) for name, entry in read_header(file).items()}
    found = {name: entries[stored] for name, stored in plain_names(entries, folder).items()}
    return {name: (entry.dtype, entry.shape) for name, entry in found.items() if prod(entry.shape)}
