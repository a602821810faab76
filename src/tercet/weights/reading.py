"""Weights in: a folder, a run, a .gguf file or the hub's cache, as tensors of a description or as a whole model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tercet.errors import InputError
from tercet.model.build import fill_parameters, make_buffers
from tercet.model.decoder import Decoder
from tercet.model.through_transformers import ThroughTransformers, as_built
from tercet.spec.families import FAMILIES, describe, read_config
from tercet.spec.families.through_transformers import TransformersModel, in_transformers
from tercet.spec.families.where import locate
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection
from tercet.weights.adapters import Merged, Product, base_of, describe_place, is_adapter
from tercet.weights.gguf import GGUFFile
from tercet.weights.stored import SafetensorsFolder, Stored

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def open_weights(place: Path, spec: Model, mapped: bool = False) -> Stored | Merged:
    """Return the weights of a folder or a .gguf file as the tensors of `spec`; `.tensor(name)` and
    `.rows(name, begin, end)` read, or with `mapped` give views of the file where it holds them as they are. Of an
    adapter's folder: its base's with the adapter added.

    Raises InputError that lists missing and unexpected tensors, or a wrong shape.
    """
    if is_adapter(place):
        base = base_of(place)
        return Merged(place, _stored(base, spec, mapped))
    return _stored(place, spec, mapped)


def _stored(place: Path, spec: Model, mapped: bool) -> Stored:
    files = GGUFFile(place, spec) if place.suffix == ".gguf" else SafetensorsFolder(place, mapped)
    return Stored(files, spec, read_config(place))


def stored_weights(name: str | Path, spec: Model) -> Stored | Merged:
    """Return the weights of a folder, for an engine that fills a model piece by piece."""
    return open_weights(model_place(name), spec)


def model_place(name: str | Path) -> Path:
    """Return where a model's weights lie: a folder, a run folder's model/ or adapter/, a .gguf file, or the hub's cache.

    `name` may also be package:NAME/FILE. Raises InputError when nothing of it is here.
    """
    path = locate(str(name))
    if path is None:
        if str(name).startswith("runs/"):  # as tercet train names its folders
            raise InputError(f"{name} is not a run folder", "Runs that are here: ls runs")
        raise InputError(f"the weights of {name} are not here", f"Get them first: tercet fetch {name}")
    if path.is_file() and path.suffix != ".gguf":
        raise InputError(
            f"{name} is a file, and no .gguf file", "A model is a run folder, a model folder or a .gguf file."
        )
    if (path / "recipe.yaml").is_file():
        return next((path / name for name in ("model", "adapter") if (path / name).is_dir()), path)
    return path


def load_model(folder: str | Path, dtype: str | None = None) -> Decoder | ThroughTransformers:
    """Return the model of a Hugging Face folder, a run folder (its model/) or a .gguf file, in evaluation mode.

    An architecture that only transformers has comes as transformers' module behind the same call.
    """
    path = model_place(folder)
    kind = read_config(base_of(path)).get("model_type")
    if kind not in FAMILIES and in_transformers(str(kind)):
        return _load_through_transformers(path, stored_dtype(path, dtype))
    spec = describe_place(path)
    return fill(spec, open_weights(path, spec, mapped=True), stored_dtype(path, dtype)).eval()


def unmerged(place: Path) -> Decoder:
    """Return base and adapter of an adapter's folder as they are trained: the products beside the weights; fp32."""
    spec = describe_place(place)
    merged = open_weights(place, spec, mapped=True)
    assert isinstance(merged, Merged)
    weights, products = merged.apart()
    model = fill(spec, weights, torch.float32).eval()

    def add(product: Product):
        def beside(module: torch.nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            return out + product.scaling * (inputs[0] @ product.a.T @ product.b.T)

        return beside

    for name, product in products.items():
        model.get_submodule(name).register_forward_hook(add(product))
    return model


def _load_through_transformers(place: Path, dtype: torch.dtype) -> ThroughTransformers:
    """Return the model of a folder whose architecture Tercet has not, in evaluation mode, on the CPU."""
    described = describe(ModelSection(path=str(place), module="transformers"))
    assert isinstance(described, TransformersModel)
    spec = as_built(described)
    module, stored = ThroughTransformers(spec), open_weights(place, spec, mapped=True)
    fill_parameters(module, "", lambda name: stored.tensor(name).to(dtype))
    make_buffers(module)
    return module.eval()


def stored_dtype(path: Path, dtype: str | None) -> torch.dtype:
    """Return the type asked for, else the config's. Raises InputError for an unknown word."""
    if dtype is None:
        config = read_config(base_of(path))
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return getattr(torch, stored.removeprefix("torch."), torch.float32)
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def fill(spec: Model, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Decoder:
    """Return a Decoder holding these tensors; buffers stay fp32. Raises when one is missing or left over."""
    with torch.device("meta"):
        model = Decoder(spec)
    kept = {t.name for t in spec.buffers()}
    state = {name: value.to(torch.float32 if name in kept else dtype) for name, value in tensors}
    model.load_state_dict(state, strict=True, assign=True)
    make_buffers(model)
    return model
