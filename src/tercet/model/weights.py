"""Weights in and out: Hugging Face folders with safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from tercet.errors import InputError
from tercet.model.decoder import Decoder
from tercet.model.gguf import GGUFFile
from tercet.model.stored import SafetensorsFolder, Stored
from tercet.spec.families import FAMILIES, describe, read_config
from tercet.spec.families.names import parts, shared_copies
from tercet.spec.families.through_transformers import TransformersModel, in_transformers
from tercet.spec.families.where import locate
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection

if TYPE_CHECKING:
    from tercet.model.through_transformers import ThroughTransformers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SHARD_BYTES = 4 * 10**9
# What belongs to a tokenizer in a folder that may hold a whole model.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                   "chat_template*", "*.model", "*.tiktoken")  # fmt: skip


# ------------------------------------------------------------------------------------------------------ reading


def open_weights(place: Path, spec: Model, mapped: bool = False) -> Stored:
    """Return the weights of a folder or a .gguf file as the tensors of `spec`; `.tensor(name)` and
    `.rows(name, begin, end)` read, or with `mapped` give views of the file where it holds them as they are.

    Raises InputError that lists missing and unexpected tensors, or a wrong shape.
    """
    files = GGUFFile(place, spec) if place.suffix == ".gguf" else SafetensorsFolder(place, mapped)
    return Stored(files, spec, read_config(place))


def read_tensors(folder: Path, spec: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and stored buffer of `spec`, one at a time, in the type stored."""
    yield from open_weights(folder, spec)


def stored_weights(name: str | Path, spec: Model) -> Stored:
    """Return the weights of a folder, for an engine that fills a model piece by piece."""
    return open_weights(model_place(name), spec)


def model_place(name: str | Path) -> Path:
    """Return where a model's weights lie: a folder, a run folder's model/, a .gguf file, or the hub's cache.

    `name` may also be package:NAME/FILE. Raises InputError when nothing of it is here.
    """
    path = locate(str(name))
    if path is None:
        raise InputError(f"the weights of {name} are not here", f"Get them first: tercet fetch {name}")
    return path / "model" if (path / "recipe.yaml").is_file() and (path / "model").is_dir() else path


def load_model(folder: str | Path, dtype: str | None = None) -> Decoder | ThroughTransformers:
    """Return the model of a Hugging Face folder, a run folder (its model/) or a .gguf file, in evaluation mode.

    An architecture that only transformers has comes as transformers' module behind the same call.
    """
    path = model_place(folder)
    kind = read_config(path).get("model_type")
    if kind not in FAMILIES and in_transformers(str(kind)):
        from tercet.model.through_transformers import load

        return load(path, stored_dtype(path, dtype))
    spec = describe(ModelSection(path=str(path)))
    return fill(spec, open_weights(path, spec, mapped=True), stored_dtype(path, dtype)).eval()


def stored_dtype(path: Path, dtype: str | None) -> torch.dtype:
    """Return the type asked for, else the config's. Raises InputError for an unknown word."""
    if dtype is None:
        config = read_config(path)
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


def fill_parameters(piece: torch.nn.Module, prefix: str, value_of: Callable[[str], Tensor]) -> None:
    """Give every parameter of `piece` that is still on meta its value, which `value_of` finds by the whole name.

    A parameter that stands in several places (a tied head) stays one.
    """
    places: dict[Tensor, list[str]] = {}
    for name, parameter in piece.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            places.setdefault(parameter, []).append(name)
    for names in places.values():
        value = torch.nn.Parameter(value_of(prefix + names[0]))
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(piece.get_submodule(owner), attribute, value)


def make_buffers(model: torch.nn.Module, device: torch.device | str = "cpu") -> None:
    """Give every buffer that is still on meta its start, zeros, and bring the others to the device."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


# ------------------------------------------------------------------------------------------------------ writing


def save_folder(
    folder: Path,
    spec: Model,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_folder: Path | None = None,
    token_ids: dict[str, int | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers' from_pretrained loads. Holds at most one shard in memory.

    tensors: (name in memory, tensor) of every parameter of `spec` and every stored buffer, in any order; names
    that `spec` lacks (further predictions that are left out) are skipped. Raises InputError when one is missing or
    has another shape than described.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(spec, TransformersModel):
        config = {key: value for key, value in spec.config.items() if key != "torch_dtype"}  # the older name of dtype
    else:
        config = FAMILIES[spec.family].to_hf(spec)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config |= {f"{name}_token_id": i for name, i in (token_ids or {}).items() if i is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {k: v for k, v in config.items() if k.endswith("_token_id")}
    if tokenizer_folder is not None:
        for file in sorted({f for pattern in TOKENIZER_FILES for f in tokenizer_folder.glob(pattern)}):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        kept = tokenizer_folder / "generation_config.json"  # sampling settings that came with the model
        if kept.is_file():
            generation = {**json.loads(kept.read_text(encoding="utf-8")), **generation}
    text = json.dumps(generation, indent=2, ensure_ascii=False)
    (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    write_shards(folder, _as_stored(spec, tensors, dtype), shard_bytes)


def _as_stored(spec: Model, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, CPU tensor): experts apart, copies of embedding and head, buffers in fp32."""
    described = {t.name: t for t in (*spec.tensors(), *spec.buffers())}
    copies: dict[str, list[str]] = {}
    for part in shared_copies(spec):
        copies.setdefault(part.tensor, []).append(part.name)
    missing = set(described)
    for name, value in tensors:
        if name not in described:
            continue
        missing.discard(name)
        tensor = described[name]
        if tuple(value.shape) != tuple(tensor.shape):  # a sharded parameter that nobody gathered is empty
            raise InputError(
                f"cannot save the model: {name} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}"
            )
        value = value.detach().to("cpu", torch.float32 if tensor.kind == "balance" else dtype)
        for part in parts(tensor):
            piece = value if part.expert is None else value[part.expert]
            # A clone: safetensors refuses tensors that share memory, and views would keep the whole alive.
            yield part.name, piece[part.begin : part.end].clone(memory_format=torch.contiguous_format)
        for copy in copies.get(name, ()):
            yield copy, value.clone(memory_format=torch.contiguous_format)
    if missing:
        raise InputError(f"cannot save the model: no value for {', '.join(sorted(missing)[:8])}")


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors of at most `shard_bytes` each (one larger tensor has its own), and the index if many."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        if held:
            save_file(held, folder / f"part-{len(shards)}.tmp", metadata={"format": "pt"})
            shards.append(list(held))
            held, size = {}, 0

    for name, tensor in tensors:
        if size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {}
    for n, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{n}.tmp").rename(folder / file)
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
