"""Old .bin weights, read without running anything from them, and written as safetensors.

A .bin file is a pickle, and a pickle can run code. `weights_only` lets tensors through and nothing else; the file
is memory-mapped, so no more than one shard is held.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tercet.errors import InputError
from tercet.weights.writing import SHARD_BYTES, TOKENIZER_FILES, write_shards

KEPT_FILES = (*TOKENIZER_FILES, "config.json", "generation_config.json")


def import_bin(folder: Path, output: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the tensors of a folder's pytorch_model*.bin as safetensors into `output`, config and tokenizer too.

    Types and names stay. Raises InputError when a shard is missing, damaged, or holds more than tensors.
    """
    files = _bin_files(folder)
    output.mkdir(parents=True, exist_ok=True)
    write_shards(output, _tensors(files), shard_bytes)
    for file in sorted({f for pattern in KEPT_FILES for f in folder.glob(pattern)}):
        if file.is_file() and not file.samefile(output / file.name if (output / file.name).exists() else folder):
            shutil.copyfile(file, output / file.name)
    return output


def _bin_files(folder: Path) -> list[Path]:
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["pytorch_model.bin"]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise InputError(f"{folder}: missing {', '.join(missing)}")
    return [folder / name for name in names]


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for file in files:
        for name, tensor in _load(file).items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
            if name in seen:
                raise InputError(f"{file}: {name} stands in two files")
            seen.add(name)
            # A clone: tied tensors share memory, which safetensors refuses.
            yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(file, map_location="cpu", weights_only=True)  # the format before zip files
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"{file} holds more than tensors and was not opened: {first}") from None
    except (RuntimeError, EOFError, OSError) as error:
        raise InputError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}, not named tensors")
    return content
