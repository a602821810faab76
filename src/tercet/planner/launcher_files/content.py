"""The content of a launcher's file: JSON or YAML, each key once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tercet.errors import InputError
from tercet.spec.recipe.loading import read_yaml


def read_file(path: str) -> dict[str, Any]:
    """Return a JSON or YAML file's mapping. Raises InputError that names the file, and the line if it is broken.

    A key that stands twice is refused, as DeepSpeed does.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
    content = _parse(text, path)
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no mapping of keys")
    return content


def _parse(text: str, path: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            line = [n for n, words in enumerate(text.splitlines(), 1) if json.dumps(twice) in words]
            where = f", line {line[-1]}" if line else ""
            raise InputError(f"{path}{where}: {twice} is given twice; DeepSpeed stops at that", "Keep one of them.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError):  # YAML, or JSON with comments, as DeepSpeed takes it
        read_yaml(text, path)
        try:
            return yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:  # a date or a number that is none; a key that is a list
            raise InputError(f"{path}: {' '.join(str(error).split())}") from None
