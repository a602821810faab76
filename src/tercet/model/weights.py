"""Weights in and out: Hugging Face folders with safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tercet.errors import InputError
from tercet.model.decoder import Decoder
from tercet.spec.families import FAMILIES, describe, read_config
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SHARD_BYTES = 4 * 10**9


def save_folder(
    folder: Path,
    spec: Model,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_folder: Path | None = None,
    token_ids: dict[str, int | None] | None = None,
) -> None:
    """Write a folder that transformers' from_pretrained loads. Holds at most one shard in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[spec.family].to_hf(spec)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config |= {f"{name}_token_id": i for name, i in (token_ids or {}).items() if i is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {k: v for k, v in config.items() if k.endswith("_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    if tokenizer_folder is not None:
        for file in sorted(tokenizer_folder.iterdir()):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    _write_shards(folder, tensors, dtype)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
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
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if size + tensor.nbytes > SHARD_BYTES:
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


def weight_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file. Raises InputError when a file that the index names is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {n: folder / f for n, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        if missing := sorted({f.name for f in files.values() if not f.is_file()}):
            raise InputError(f"{folder}: the index names files that are missing: {', '.join(missing)}")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise InputError(f"{folder} has no model.safetensors and no index of shards")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def read_tensors(folder: Path, spec: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of `spec`, memory-mapped, in the type stored.

    Raises InputError that lists missing and unexpected tensors, or a wrong shape.
    """
    files, wanted = weight_files(folder), {t.name: t for t in spec.tensors()}
    extra = set(files) - set(wanted) - ({"lm_head.weight"} if spec.tied else set())
    missing = set(wanted) - set(files)
    if missing or extra:
        raise InputError(
            f"{folder}: tensors do not match the model: missing {_names(missing)}; unexpected {_names(extra)}"
        )
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name not in wanted:
                    continue
                tensor = file.get_tensor(name)
                if tuple(tensor.shape) != wanted[name].shape:
                    raise InputError(f"{path}: {name} has shape {tuple(tensor.shape)}, expected {wanted[name].shape}")
                yield name, tensor


def _names(names: set[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(sorted(names)[:8])
    return f"{len(names)} ({shown}{', …' if len(names) > 8 else ''})"


def load_model(folder: str | Path, dtype: str | None = None) -> Decoder:
    """Return the model of a Hugging Face folder, or of a run folder (its model/), in evaluation mode."""
    path = Path(folder).expanduser()
    if (path / "recipe.yaml").is_file() and (path / "model").is_dir():
        path = path / "model"
    spec = describe(ModelSection(path=str(path)))
    if dtype is None:
        config = read_config(path)
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        target = getattr(torch, stored.removeprefix("torch."), torch.float32)
    elif dtype in DTYPES:
        target = DTYPES[dtype]
    else:
        raise InputError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict({n: t.to(target) for n, t in read_tensors(path, spec)}, strict=True, assign=True)
    return model.eval()
