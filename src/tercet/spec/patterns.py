"""Patterns of names of modules and tensors, as a recipe gives them."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(name: str, pattern: str) -> bool:
    """Whether a name ends in these words, or matches them as a pattern with *, ? and [ ]."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def names(tensor: str, pattern: str) -> bool:
    """Whether a pattern means a tensor: by its name or by its module's."""
    return fits(tensor, pattern) or fits(tensor.rpartition(".")[0], pattern)
