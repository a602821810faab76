"""Stored weights: a folder of safetensors, seen as the tensors of a Model. Reads the rows asked for and no others.

Names are normalised (wrappers' prefixes), experts are stacked on the way, DeepSeek's FP8 matrices are multiplied
with their block scales, a larger vocabulary is filled with the mean row. Whatever is missing or left over is an
error that lists names: a model that is half random looks like one that trains badly.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tercet.errors import InputError, listed
from tercet.spec.families import read_config
from tercet.spec.families.names import StoredTensor, parts, plain_names, shared_copies
from tercet.spec.families.safetensors_header import tensor_files
from tercet.spec.model import Model
from tercet.spec.model import Tensor as Description
from tercet.weights.safetensors_file import SafetensorsFile

READERS = 4  # tensors read at once
SCALES = "_scale_inv"  # DeepSeek's FP8 files: weight_scale_inv holds what each block is multiplied with
_TABLES = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # old files hold these; they follow from config


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096


class Files(Protocol):
    """Named tensors in files, whatever the format."""

    where: str

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of a tensor, in the type stored (fp32 when stored quantised)."""
        ...


class SafetensorsFolder:
    """The safetensors of a Hugging Face folder, sharded or not. Raises InputError when a shard is missing."""

    def __init__(self, folder: Path, mapped: bool = False):
        self._mapped = mapped
        self.where = str(folder)
        self._open: dict[Path, SafetensorsFile] = {}
        files = weight_files(folder)
        self._stored = plain_names(files, folder)  # plain name -> name in the file
        self._file = {name: files[stored] for name, stored in self._stored.items()}
        self._block = (128, 128)
        if (folder / "config.json").is_file():
            quantization = read_config(folder).get("quantization_config") or {}
            self._block = tuple(quantization.get("weight_block_size") or self._block)

    def names(self) -> set[str]:
        return {n for n in self._file if not (n.endswith(SCALES) and n.removesuffix(SCALES) in self._file)}

    def _in(self, name: str) -> SafetensorsFile:
        path = self._file[name]
        if path not in self._open:
            self._open[path] = SafetensorsFile(path, self._mapped)
        return self._open[path]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._in(name).shape(self._stored[name])

    def read(self, name: str, begin: int, end: int) -> Tensor:
        rows = self._in(name).rows(self._stored[name], begin, end)
        if rows.dtype != torch.float8_e4m3fn:
            return rows
        if name + SCALES not in self._file:
            raise InputError(f"{self._file[name]}: {name} is FP8 but {name + SCALES} is missing")
        height, width = self._block
        first = begin // height
        scales = self._in(name + SCALES).rows(self._stored[name + SCALES], first, -(-end // height))
        scales = scales.repeat_interleave(height, 0)[begin - first * height :][: end - begin]
        return rows.float() * scales.repeat_interleave(width, 1)[:, : rows.shape[1]]


def weight_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file. Raises InputError when there are none, or the index is damaged or names other places."""
    files = tensor_files(folder)
    if files is None:
        found = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"It holds {found[0]}; once: tercet fetch {folder} --import-bin --output {folder}" if found else None
        raise InputError(f"{folder} has no model.safetensors and no index of shards", hint)
    return files


def extra_copies(spec: Model) -> set[str]:
    """Return the names of what a file may hold a second time: a tied head, and the copies in further predictions."""
    return {part.name for part in shared_copies(spec)} | ({HEAD} if spec.tied else set())


class Stored:
    """The tensors of `spec` in `files`. Raises InputError that lists what is missing, left over or misshapen."""

    def __init__(self, files: Files, spec: Model, config: dict[str, Any] | None = None):
        self.files, self.spec = files, spec
        described = (*spec.tensors(), *spec.buffers())
        self._descriptions = {t.name: t for t in described}
        self._parts = {t.name: parts(t) for t in described}
        self._check(config or {})

    def _check(self, config: dict[str, Any]) -> None:
        have = self.files.names()
        wanted = {part.name: part for group in self._parts.values() for part in group}
        for tensor in self._descriptions.values():  # a file may hold experts stacked, as they are in memory
            if tensor.kind == "expert" and tensor.name in have:
                for part in self._parts[tensor.name]:
                    wanted.pop(part.name)
                whole = StoredTensor(tensor.name, tensor.name, tensor.shape, None, 0, tensor.shape[0])
                self._parts[tensor.name], wanted[tensor.name] = (whole,), whole
        missing = set(wanted) - have
        extra = {name for name in have - set(wanted) if not self._known_extra(name, config)}
        if missing or extra:
            raise InputError(
                f"{self.files.where}: tensors do not match the model: missing {listed(missing)}; "
                f"unexpected {listed(extra)} ({len(set(wanted) & have)} of {len(wanted)} found)"
            )
        for name, part in wanted.items():
            shape = self.files.shape(name)
            resized = self._is_vocabulary(self._descriptions[part.tensor]) and shape[1:] == part.shape[1:]
            if shape != part.shape and not (resized and shape[0] <= part.shape[0]):
                raise InputError(f"{self.files.where}: {name} has shape {shape}, expected {part.shape}")

        self._check_copies(extra_copies(self.spec) & have)

    def _check_copies(self, names: set[str]) -> None:
        """Raise InputError when what should repeat the embedding or the head is another tensor: it would be dropped."""
        sources = {part.name: part.tensor for part in shared_copies(self.spec)}
        for name in sorted(names):
            source = sources.get(name, EMBEDDING)
            mine, other = self.files.shape(name), self.files.shape(source)
            pieces = range(0, mine[0], COMPARED_ROWS) if mine == other else ()
            same = (torch.equal(*(self.files.read(n, b, b + COMPARED_ROWS) for n in (name, source))) for b in pieces)
            if mine != other or not all(same):
                raise InputError(
                    f"{self.files.where}: {name} should repeat {source}, and differs from it; it would be lost",
                    "A head of its own is read with model.tied=false." if name == HEAD else None,
                )

    def _known_extra(self, name: str, config: dict[str, Any]) -> bool:
        """Tell tensors that may be left unread: copies, tables, and predictions that the recipe switched off."""
        if (self.spec.tied and name == "lm_head.weight") or name in self.spec.unread or _TABLES.search(name):
            return True
        announced = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
        layers, kept = len(self.spec.layers), len(self.spec.mtp)
        if name in {part.name for part in shared_copies(self.spec)}:
            return True
        dropped = range(layers + kept, layers + announced)
        return any(name.startswith(f"model.layers.{n}.") for n in dropped) or 0 in self.files.shape(name)

    @staticmethod
    def _is_vocabulary(tensor: Description) -> bool:
        return tensor.axes[:1] == ("vocabulary",)

    def tensor(self, name: str) -> Tensor:
        """Return a whole parameter or buffer, on the CPU, in the type stored."""
        return self.rows(name, 0, self._descriptions[name].shape[0])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of a parameter; of stacked experts, those experts. Reads nothing else."""
        tensor, group = self._descriptions[name], self._parts[name]
        if group[0].expert is None:
            have = self.files.shape(group[0].name)[0]
            if have < tensor.shape[0] and end > have:
                return self._grown(group[0].name, begin, end, have)
            return self.files.read(group[0].name, begin, end)
        result: Tensor | None = None
        for part in group:
            if begin <= part.expert < end:  # type: ignore[operator]
                value = self.files.read(part.name, 0, part.shape[0])
                if result is None:
                    result = torch.empty(end - begin, *tensor.shape[1:], dtype=value.dtype)
                result[part.expert - begin, part.begin : part.end] = value  # type: ignore[operator]
        return torch.empty(0, *tensor.shape[1:]) if result is None else result

    def _grown(self, name: str, begin: int, end: int, have: int) -> Tensor:
        """Return rows of a vocabulary that grew: new words start at the mean of the old ones."""
        old = self.files.read(name, 0, have)
        mean = old.float().mean(0, keepdim=True).to(old.dtype)
        return torch.cat((old[begin:], mean.expand(end - max(begin, have), -1)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once, read a few ahead: copying and page faults keep more than one core busy."""
        names = list(self._descriptions)
        with ThreadPoolExecutor(READERS) as pool:
            ahead = deque(pool.submit(self.tensor, name) for name in names[:READERS])
            for n, name in enumerate(names):
                value = ahead.popleft().result()
                if n + READERS < len(names):
                    ahead.append(pool.submit(self.tensor, names[n + READERS]))
                yield name, value
