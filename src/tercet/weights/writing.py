"""Weights out: Hugging Face folders with safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.errors import InputError
from tercet.spec.families import FAMILIES, read_config, read_json_object
from tercet.spec.families.names import parts, shared_copies
from tercet.spec.families.through_transformers import TransformersModel
from tercet.spec.model import Model
from tercet.weights.safetensors_file import save_file

SHARD_BYTES = 4 * 10**9
# What belongs to a tokenizer in a folder that may hold a whole model.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def save_folder(
    folder: Path,
    spec: Model,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_folder: Path | None = None,
    token_ids: dict[str, int | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
    new_tokenizer: bool = False,
) -> None:
    """Write a folder that transformers' from_pretrained loads. Holds at most one shard in memory.

    tensors: (name in memory, tensor) of every parameter of `spec` and every stored buffer, in any order; names
    that `spec` lacks (further predictions that are left out) are skipped. Raises InputError when one is missing or
    has another shape than described.

    source: the folder that the model came from. What it says of token ids and of sampling stays; `token_ids` (eos,
    bos, pad, as trained) are added where it lacks them, and take their place when the tokenizer is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(spec, TransformersModel):
        config = {key: value for key, value in spec.config.items() if key != "torch_dtype"}  # the older name of dtype
    else:
        config = FAMILIES[spec.family].to_hf(spec)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)
    said, generation = _said_by(source or tokenizer_folder)
    if new_tokenizer:
        said, generation = {}, {k: v for k, v in generation.items() if not k.endswith("_token_id")}
    config |= _token_ids(said, token_ids or {})
    generation = {**generation, **_token_ids({**config, **generation}, token_ids or {})}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    write_shards(folder, _as_stored(spec, tensors, dtype), shard_bytes)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer, its chat template included, out of a folder that may hold a whole model."""
    for file in sorted({f for pattern in TOKENIZER_FILES for f in source.glob(pattern)}):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def _said_by(folder: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config, generation settings) of the folder or .gguf file that a model came from, as far as it has them."""
    if folder is None:
        return {}, {}
    here = folder.suffix == ".gguf" or (folder / "config.json").is_file()
    generation = folder / "generation_config.json"
    return read_config(folder) if here else {}, read_json_object(generation) if generation.is_file() else {}


def _token_ids(said: dict[str, Any], trained: dict[str, int | None]) -> dict[str, Any]:
    """Return the *_token_id entries: those said, the trained ones where nothing is said. A trained end always ends."""
    found = {key: value for key, value in said.items() if key.endswith("_token_id") and value is not None}
    for name, i in trained.items():
        if i is not None:
            found.setdefault(f"{name}_token_id", i)
    end, ends = trained.get("eos"), found.get("eos_token_id")
    if end is not None and ends != end and end not in (ends := ends if isinstance(ends, list) else [ends]):
        found["eos_token_id"] = [*ends, end]
    return found


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file. What the system refuses (a full disk) is an OSError here, not safetensors' own."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors of at most `shard_bytes` each (one larger tensor has its own), and the index if many."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        if held:
            save_tensors(folder / f"part-{len(shards)}.tmp", held)
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
