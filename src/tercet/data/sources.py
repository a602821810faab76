"""From the paths of a recipe to files: single files, folders, globs, files inside installed packages."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tercet.data import folders, formats, hub
from tercet.data.compressed import COMPRESSED, UNREADABLE
from tercet.data.formats import chats
from tercet.data.rows import Fault, Reading, Row
from tercet.errors import InputError, nearest
from tercet.spec.recipe import DataSection, SourceSection

_BLOCK = 1 << 22
WITHOUT_COLUMNS = ("text", "python")  # formats


@dataclass(frozen=True)
class File:
    """One file to read; `format` is the name of a module in `formats`."""

    path: Path
    format: str
    bytes: int

    @property
    def name(self) -> str:
        """The path as it can be printed and stored, whatever bytes the file system holds."""
        return _printable(str(self.path))

    def read(self, reading: Reading) -> Iterator[Row | Fault]:
        """Yield every row. Raises InputError that names the file when it cannot be read to its end."""
        try:
            yield from formats.formats()[self.format].read(self.path, reading)
        except UNREADABLE as error:
            raise InputError(f"{self.name} cannot be read to its end: {error}") from None


@dataclass(frozen=True)
class Source:
    """One entry of data.train or data.validation, with its files in a fixed order.

    `passed`: (path, reason) of what lay beside them and is not read.
    """

    section: SourceSection
    files: tuple[File, ...]
    passed: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return _printable(self.section.path)

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files)

    def reading(self, part_characters: int) -> Reading:
        """Return how its files are read."""
        layout = self.section.format if self.section.format in chats.layouts() else None
        return Reading(self.section.map, part_characters, layout=layout)


def paths_of(sources: Sequence[Source]) -> str:
    """Return the files of sources as a sentence ends with them: "/data/a.jsonl and 3 more files"."""
    paths = [_printable(str(f.path)) for s in sources for f in s.files]
    more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
    return f"{paths[0]}{more}" if paths else "no file"


def _printable(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def find(section: SourceSection, key: str) -> Source:
    """Return the files of a source. `key` names it in messages (data.train.0).

    Folders are searched through all levels for files of known formats (see `folders`); a glob or a single path
    takes what it names. Files are ordered by path, so that the same files always make the same set. Raises
    InputError when nothing is found, when a file's format is not known, or when `map` has a key that nothing reads.
    """
    if unknown := sorted(set(section.map) - set(chats.columns())):
        raise InputError(
            f"{key}.map: unknown key {unknown[0]!r}{nearest(unknown[0], chats.columns())}",
            f"Keys are our names, values the file's columns: {', '.join(chats.columns())}.",
        )
    found = _paths(section.path, key)
    if section.format == "auto" or section.format in chats.layouts():
        files = [File(p, formats.detect(p), p.stat().st_size) for p in found.taken]
    else:
        for path in found.taken:
            formats.head_of(path)
        files = [File(p, section.format, p.stat().st_size) for p in found.taken]
    _check_map(section, files, key)
    return Source(section, tuple(files), tuple((_printable(str(p)), why) for p, why in found.passed))


def find_all(data: DataSection) -> tuple[list[Source], list[Source] | float | None]:
    """Return (training sources, held-out sources, or the fraction held out). Raises InputError, as `find` does."""
    train = [find(s, f"data.train.{n}") for n, s in enumerate(data.train)]
    held = data.validation
    if isinstance(held, list):
        held = [find(s, f"data.validation.{n}") for n, s in enumerate(held)]
    if data.stream:
        _check_stream(data)
    everything = [f for s in (*train, *(held if isinstance(held, list) else ())) for f in s.files]
    if data.long_rows == "cut" and all(f.format == "text" for f in everything):
        raise InputError(
            "data.long_rows is cut, but every file is plain text, which has no rows and is always split",
            "Take data.long_rows out.",
        )
    named = {"template": data.template, "train_on": None if data.train_on == "all" else data.train_on}
    for key, value in named.items():
        if value is not None and all(f.format in WITHOUT_COLUMNS for f in everything):
            raise InputError(
                f"data.{key} is {value}, but every file is plain text, which holds no chats", "Take it out."
            )
    return train, held


def _check_stream(data: DataSection) -> None:
    """Raise InputError for what can only be had of a set that is read to its end before training."""
    for key, needs, asked in (
        ("data.tokenizer=train", "a tokenizer is trained", data.tokenizer == "train"),
        ("data.validation as a fraction", "documents are held out", isinstance(data.validation, float)),
        ("data.temperature", "sources share by their sequences", data.temperature != 1),
        ("data.train.*.epochs", "sources share by their sequences", any(s.epochs is not None for s in data.train)),
    ):
        if asked:
            raise InputError(
                f"data.stream and {key}: {needs} when the whole set has been read, and a stream is not read beforehand",
                "Give a tokenizer, a file for data.validation and weights for sources; or take data.stream out.",
            )


def _check_map(section: SourceSection, files: list[File], key: str) -> None:
    """Raise InputError for a `map` of files that have no columns."""
    if section.map and all(f.format in WITHOUT_COLUMNS for f in files):
        raise InputError(f"{key}.map: {section.path} is {files[0].format}, which has no columns", "Take map out.")


def _paths(text: str, key: str) -> folders.FolderFiles:
    if text.startswith("package:"):
        return folders.FolderFiles([_in_package(text, key)])
    path = Path(text).expanduser()
    if path.is_file():
        return folders.FolderFiles([path])
    if path.is_dir():
        found = folders.search(path, "validation" if key.startswith("data.validation") else "train")
        if not found.taken:
            raise InputError(
                f"{key}: the folder {text} holds no file of a known format{_reasons(found)}",
                f"Known endings: {', '.join(sorted(formats.suffixes() - {'.py'}))}, compressed (.gz, .zst) or not. "
                f"A glob such as {text}/*.xyz takes other names.",
            )
        return found
    if glob.has_magic(text):
        found = folders.matches(path)
        if found.taken:
            return found
        raise InputError(
            f"{key}: nothing matches {text!r}", f"Paths are taken from the working directory, {Path.cwd()}."
        )
    if (named := hub.set_name(text)) and (text.startswith(hub.PREFIX) or not path.parent.is_dir()):
        return _on_hub(*named, key)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise InputError(f"{key}: there is no file or folder {text!r}{nearest(path.name, beside)}", _other_ways(text))


def _other_ways(text: str) -> str | None:
    """Return how what was probably meant is written."""
    words = text.replace(",", " ").split()
    if len(words) > 1 and all(Path(word).expanduser().exists() for word in words):
        return f"Several: data.train=[{', '.join(words)}]"
    if re.match(r"https?://", text):
        return "Nothing is fetched from an address: download it, and give the file. A hub's data set: hub:OWNER/NAME."
    return "A hub's data set is hub:OWNER/NAME." if text.startswith(hub.PREFIX) else None


def _on_hub(name: str, inside: str, key: str) -> folders.FolderFiles:
    """Return the files of a hub's data set for one side, by the hub's own rule of splits."""
    endings = sorted(formats.suffixes() - {".py", *folders.TEXTS})
    endings += [f"{e}{packed}" for e in endings for packed in COMPRESSED]
    hint = (
        "Give a file or folder; a data set of the hub is fetched once, as hub:owner/name, and then used from its cache."
    )
    folder = hub.fetch(name, key, [f"*{e}" for e in endings], "dataset", hint)
    place = hub.one_set(folder, name, inside, key, endings)
    found = folders.search(place, "validation" if key.startswith("data.validation") else "train")
    if not found.taken:
        raise InputError(f"{key}: {name} on the hub holds no file of a known format{_reasons(found)}")
    return found


def _reasons(found: folders.FolderFiles) -> str:
    counts = Counter(why for _, why in found.passed)
    return f" (passed over: {', '.join(f'{n} {why}' for why, n in counts.most_common())})" if counts else ""


def _in_package(text: str, key: str) -> Path:
    """Return the file that package:NAME/FILE means. The package is found, not imported."""
    name, _, inside = text.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"{key}: no package {name!r} is installed here", "Write package:NAME/FILE.")
    for folder in spec.submodule_search_locations:
        path = Path(folder) / inside
        if inside and ".." not in Path(inside).parts and path.is_file():
            return path
    raise InputError(f"{key}: the package {name!r} has no file {inside!r}")


def content_hashes(files: Sequence[File], done: Callable[[int], None]) -> list[str]:
    """Return the BLAKE2b hash of each file's bytes. `done(n)` is told of every n bytes read.

    Two threads are enough to be faster than the disk; hashing leaves the interpreter free.
    """

    def one(file: File) -> str:
        digest = hashlib.blake2b(digest_size=20)
        with file.path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                done(len(block))
        return digest.hexdigest()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, files))
