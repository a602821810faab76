"""Tensor names on disk. In memory experts are stacked; the hub's files hold each expert's matrices by themselves.

The rule is one for every family that has experts (DeepSeek V1–V3, Qwen 3): `mlp.experts.gate_up_proj` of shape
(experts, 2 * ffn, width) is `mlp.experts.{e}.gate_proj.weight` over `mlp.experts.{e}.up_proj.weight`, and
`mlp.experts.down_proj` is `mlp.experts.{e}.down_proj.weight`. All other names are the same in both places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tercet.errors import InputError
from tercet.spec.model import Model, Tensor

PREFIXES = ("_orig_mod.", "module.", "base_model.model.")  # left by torch.compile, DDP and peft around a model


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: it fills rows `begin` to `end` of `tensor[expert]` (of all of it without an expert)."""

    name: str
    tensor: str  # in memory
    shape: tuple[int, ...]
    expert: int | None = None
    begin: int = 0
    end: int = 0


def parts(tensor: Tensor) -> tuple[StoredTensor, ...]:
    """Return what a tensor is made of on disk, in order."""
    if tensor.kind != "expert":
        return (StoredTensor(tensor.stored or tensor.name, tensor.name, tensor.shape, None, 0, tensor.shape[0]),)
    stem, _, last = tensor.name.rpartition(".")
    experts, rows, columns = tensor.shape
    if last == "down_proj":
        pieces = (("down_proj", 0, rows),)
    else:
        pieces = (("gate_proj", 0, rows // 2), ("up_proj", rows // 2, rows))
    return tuple(
        StoredTensor(f"{stem}.{e}.{name}.weight", tensor.name, (end - begin, columns), e, begin, end)
        for e in range(experts)
        for name, begin, end in pieces
    )


def stored(model: Model) -> tuple[StoredTensor, ...]:
    """Return every tensor of a saved folder: parameters, balancing biases, and the copies of embedding and
    head that the published files hold in each further prediction."""
    found = [part for tensor in (*model.tensors(), *model.buffers()) for part in parts(tensor)]
    return (*found, *shared_copies(model))


def shared_copies(model: Model) -> tuple[StoredTensor, ...]:
    """Return the tensors that repeat the embedding and the head inside each further prediction."""
    head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
    shape = (model.vocabulary, model.width)
    found = []
    for k in range(len(model.mtp)):
        prefix = f"model.layers.{len(model.layers) + k}."
        found.append(
            StoredTensor(f"{prefix}embed_tokens.weight", "model.embed_tokens.weight", shape, None, 0, shape[0])
        )
        found.append(StoredTensor(f"{prefix}shared_head.head.weight", head, shape, None, 0, shape[0]))
    return tuple(found)


def plain(name: str) -> str:
    """Return a name without the wrappers' prefixes, wherever they stand."""
    for prefix in PREFIXES:
        name = name.replace(f".{prefix}", ".")
    while any(name.startswith(prefix) for prefix in PREFIXES):
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
    return name


def plain_names(names: Iterable[str], where: object) -> dict[str, str]:
    """Return plain name -> name in the files. Raises InputError when two names mean one tensor."""
    found: dict[str, str] = {}
    for name in names:
        if (other := found.setdefault(plain(name), name)) != name:
            raise InputError(
                f"{where} holds {other} and {name}, which are two names of one tensor",
                "Which of the two is meant cannot be known; save the folder again with one of them.",
            )
    return found
