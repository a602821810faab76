"""Names, types, shapes and places of the tensors in a folder's safetensors files. Reads headers, never a tensor;
loads no torch.

A file is eight bytes of length, a JSON header, then the bytes of the tensors: the format's own definition
(https://huggingface.co/docs/safetensors, "Format"), whose limits are checked here before anything is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from tercet.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit
TYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: bytes [begin, end) of the file itself."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Return name -> Entry. Raises InputError that names the file when it is none, damaged or cut short."""
    try:
        with path.open("rb") as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
                raise ValueError(f"its first eight bytes announce a header of {length} bytes, the file has {size}")
            header = json.loads(file.read(length), object_pairs_hook=_each_once)
        if not isinstance(header, dict):
            raise ValueError("its header is not a mapping")
        header.pop("__metadata__", None)
        found = {name: _entry(name, value, 8 + length) for name, value in header.items()}
        _check_places(found.values())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file: {error}", "Fetch or save it again.") from None
    if size < (last := max((entry.end for entry in found.values()), default=0)):
        raise InputError(f"{path} is cut short: {size} bytes, its header speaks of {last}", "Fetch it again.")
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands in its header twice")
    return found


def _entry(name: str, value: Any, base: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"the entry of {name!r} lacks dtype, shape or data_offsets") from None
    sides = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 <= n < 2**62 for n in sides) or not isinstance(dtype, str) or begin > end:
        raise ValueError(f"the entry of {name!r} makes no sense: {str(value)[:120]}")
    if dtype in TYPE_BYTES and end - begin != prod(shape) * TYPE_BYTES[dtype]:
        raise ValueError(f"{name!r} of type {dtype} and shape {shape} has {end - begin} bytes")
    return Entry(dtype, tuple(shape), base + begin, base + end)


def _check_places(entries: Iterable[Entry]) -> None:
    reached = 0
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin < reached:
            raise ValueError("two of its tensors lie in the same bytes")
        reached = entry.end


def tensor_files(folder: Path) -> dict[str, Path] | None:
    """Return tensor name -> file, by the index if there is one; None when the folder has no safetensors.

    Raises InputError for two sets of weights side by side, and for an index that is damaged, names a file outside of
    the folder, or one that is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        return dict.fromkeys(read_header(single), single) if single.is_file() else None
    try:
        names = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise TypeError
    except OSError as error:
        raise InputError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{index} is not an index of shards: weight_map (tensor: file) was expected") from None
    for file in sorted(set(names.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise InputError(f"{index} names {file!r}, which is no file of its folder; it was not opened")
    if SINGLE not in names.values() and (folder / SINGLE).is_file():
        raise InputError(
            f"{folder} holds two sets of weights: {SINGLE}, and the shards of {INDEX}; which is meant cannot be known "
            f"(transformers would take {SINGLE})",
            "Remove the one that is old: the index with its shards, or the single file.",
        )
    if missing := sorted(file for file in set(names.values()) if not (folder / file).is_file()):
        raise InputError(f"{folder}: the index names files that are missing: {', '.join(missing)}")
    return {name: folder / file for name, file in names.items()}


def equal_bytes(folder: Path, first: str, second: str) -> bool:
    """Whether two tensors of a folder have the same type, shape and bytes. Reads until they differ."""
    files = tensor_files(folder) or {}
    state = tuple((str(files[name]), files[name].stat().st_mtime_ns) for name in (first, second))
    return _equal_bytes(first, second, state)


@lru_cache(maxsize=8)  # a run describes its model many times
def _equal_bytes(first: str, second: str, files: tuple[tuple[str, int], ...]) -> bool:
    places = [
        (Path(file), read_header(Path(file)).get(name)) for name, (file, _) in zip((first, second), files, strict=True)
    ]
    (path_a, a), (path_b, b) = places
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with path_a.open("rb") as one, path_b.open("rb") as other:
        one.seek(a.begin)
        other.seek(b.begin)
        for at in range(0, a.end - a.begin, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, a.end - a.begin - at)
            if one.read(count) != other.read(count):
                return False
    return True
