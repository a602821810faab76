"""Tensors of a GGUF file under Hugging Face names, dequantised on the CPU a few rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tercet.spec.blocks.gqa import GQA
from tercet.spec.families.gguf import KINDS, reader
from tercet.spec.families.names import stored
from tercet.spec.model import Model


class GGUFFile:
    """Implements tercet.weights.stored.Files. Values are fp32: what the quantised numbers mean."""

    def __init__(self, path: Path, spec: Model):
        import gguf

        self.where = str(path)
        self._gguf = gguf
        file = reader(path)
        self._tensors = {t.name: t for t in file.tensors}
        kind = next(k for k, family in KINDS.items() if family == spec.family)
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
        names = gguf.get_tensor_name_map(arch, len(spec.layers))
        # name in memory or on the hub -> (name in the file, expert)
        self._names: dict[str, tuple[str, int | None]] = {}
        for part in stored(spec):
            plain = part.name if part.expert is None else part.name.replace(f"experts.{part.expert}.", "experts.")
            found = names.get_name(plain, try_suffixes=(".weight", ".bias"))
            if found is not None and found in self._tensors:
                self._names[part.name] = (found, part.expert)
        used = {name for name, _ in self._names.values()} | {"rope_freqs.weight"}
        self._unknown = {name for name in self._tensors if name not in used}
        attention = spec.layers[0].attention
        assert isinstance(attention, GQA)
        # llama.cpp turns Llama's half-split query and key rows into neighbours; Qwen's it leaves.
        self._heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if kind == "llama" else {}

    def names(self) -> set[str]:
        return set(self._names) | self._unknown

    def _tensor(self, name: str) -> tuple[Any, int | None]:
        file_name, expert = self._names.get(name, (name, None))
        return self._tensors[file_name], expert

    def shape(self, name: str) -> tuple[int, ...]:
        tensor, expert = self._tensor(name)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return shape if expert is None else shape[1:]

    def read(self, name: str, begin: int, end: int) -> Tensor:
        tensor, expert = self._tensor(name)
        rows = np.arange(begin, end)
        heads = self._heads.get(tensor.name.split(".")[-2])
        if heads:
            rows = half_split_rows(self.shape(name)[0], heads)[rows]
        data = tensor.data if expert is None else tensor.data[expert]
        values = self._gguf.dequantize(data[rows], tensor.tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def half_split_rows(rows: int, heads: int) -> np.ndarray:
    """Return for each row of a half-split projection the row of llama.cpp's that holds it: within a head,
    (pair, member) becomes (member, pair)."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
