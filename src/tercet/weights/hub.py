"""Getting a model's files: from the Hugging Face hub or a mirror of it (HF_ENDPOINT), or from ModelScope.

Interrupted downloads continue where they stopped; the disk is looked at before the first byte; nothing of a
repository is run. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlparse

from tercet.errors import InputError, TercetError
from tercet.spec.families.where import MODELSCOPE, is_hub_name, locate, modelscope_folder
from tercet.spec.recipe import ModelSection
from tercet.units import show_bytes

SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")  # config and tokenizer
WEIGHTS = ("*.safetensors",)
PICKLED = ("pytorch_model*.bin",)
SPARE_BYTES = 2**30  # left free on the disk

Say = Callable[[str], None]
Arrived = Callable[[int], None]  # is called with every number of bytes that arrived


@dataclass(frozen=True)
class RemoteFile:
    path: str
    size: int
    sha256: str | None = None


def ensure_here(section: ModelSection, say: Say = lambda text: None) -> None:
    """Fetch a recipe's model when it is a hub name whose weights are needed and not here yet."""
    if section.path is None or section.init == "random" or Path(section.path).expanduser().exists():
        return  # what lies here wins over a repository of the same name
    if section.path.startswith(MODELSCOPE) or is_hub_name(section.path):
        place = locate(section.path)
        if place is None or not (place.is_file() or any(place.glob("*.safetensors"))):
            fetch(section.path, say=say)


def fetch(
    name: str,
    *,
    output: Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    only_config: bool = False,
    pickled: bool = False,
    say: Say = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder with a model's files, fetched as far as they are not here.

    name: owner/name on the hub (mirror: HF_ENDPOINT; token: HF_TOKEN or `token`), or modelscope:owner/name.
    Without safetensors in the repository its .bin files are fetched only when `pickled` asks for it. `progress(done, total)`
    is called with the bytes that have come; without it `say` is told of every tenth.
    Raises InputError for a repository that does not exist or may not be read, or a disk that is too small.
    """
    if name.startswith(MODELSCOPE):
        source: Any = ModelScope(name, revision or "master")
        folder = output or modelscope_folder(name)
    else:
        source = HuggingFace(name, revision, token)
        folder = output
    files = _wanted(name, source.files(), only_config, pickled)
    missing = source.missing(files, folder)
    need = sum(f.size for f in missing)
    _check_disk(name, folder or source.cache(), need)
    if missing:
        say(f"fetching {name}: {len(missing)} of {len(files)} files, {show_bytes(need)}")
    return source.fetch(files, folder, _Counter(name, need, say, progress))


class _Counter:
    """Adds up what arrives and passes it on."""

    def __init__(self, name: str, total: int, say: Say, progress: Callable[[int, int], None] | None):
        self.name, self.total, self.say, self.progress, self.done = name, total, say, progress, 0

    def __call__(self, count: int) -> None:
        tenths = 10 * self.done // max(self.total, 1)
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)
        elif 10 * self.done // max(self.total, 1) > tenths:
            self.say(f"{self.name}: {show_bytes(self.done)} of {show_bytes(self.total)}")


def _wanted(name: str, files: list[RemoteFile], only_config: bool, pickled: bool) -> list[RemoteFile]:
    top = [f for f in files if "/" not in f.path]  # folders inside hold other formats

    def of(patterns: tuple[str, ...]) -> list[RemoteFile]:
        return [f for f in top if any(fnmatch(f.path, p) for p in patterns)]

    small, weights, bins = of(SMALL), of(WEIGHTS), of(PICKLED)
    if not any(f.path == "config.json" for f in small):
        raise InputError(f"{name} has no config.json: it is not a model in Hugging Face's form")
    if only_config:
        return small
    if weights:
        return small + weights
    if not bins:
        raise InputError(f"{name} has no weights that can be read: neither safetensors nor pytorch_model.bin")
    if not pickled:
        raise InputError(
            f"{name} has pickled .bin weights only ({show_bytes(sum(f.size for f in bins))})",
            f"Import them once, without running code from them: tercet fetch {name} --import-bin --output FOLDER",
        )
    return small + bins


def _check_disk(name: str, folder: Path, need: int) -> None:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if need and free < need + SPARE_BYTES:
        raise InputError(
            f"{name} needs {show_bytes(need)} in {folder}, where {show_bytes(free)} are free",
            "Free some space, or choose another place: tercet fetch --output FOLDER, or HF_HOME for the cache.",
        )


class HuggingFace:
    """The hub through its own client, which lists, verifies and locks. Large files come by `download`: the client
    begins a broken one anew since its release 2.4.
    """

    def __init__(self, name: str, revision: str | None, token: str | None):
        # Read here, not when the library was imported: a mirror may be set in between.
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.name, self.revision, self.token = name, revision, token or os.environ.get("HF_TOKEN")

    def files(self) -> list[RemoteFile]:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token)
        info = self._ask(lambda: api.model_info(self.name, revision=self.revision, files_metadata=True))
        self.commit = info.sha
        return [RemoteFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None) for s in info.siblings or []]

    def missing(self, files: list[RemoteFile], folder: Path | None) -> list[RemoteFile]:
        planned = self._ask(lambda: self._snapshot(files, folder, dry_run=True))
        wanted = {f.filename for f in planned if f.will_download}
        return [f for f in files if f.path in wanted]

    def fetch(self, files: list[RemoteFile], folder: Path | None, arrived: Arrived) -> Path:
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers(token=self.token)
        for file in self.missing(files, folder):
            if file.sha256 is None:
                continue  # small: kept in git itself
            # Where the client looks before it asks the network: its cache holds large files under their hash.
            blobs = self.cache() / f"models--{self.name.replace('/', '--')}" / "blobs"
            target = folder / file.path if folder else blobs / file.sha256
            url = f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(file.path)}"
            download(url, target, file, self.name, headers, arrived)
        return Path(self._ask(lambda: self._snapshot(files, folder)))

    def cache(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)

    def _snapshot(self, files: list[RemoteFile], folder: Path | None, **options: Any) -> Any:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.name,
            revision=self.revision,
            token=self.token,
            endpoint=self.endpoint,
            allow_patterns=[f.path for f in files],
            local_dir=folder,
            **options,
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        from huggingface_hub import errors

        try:
            return question()
        except errors.GatedRepoError:
            raise InputError(
                f"{self.name} is open only to those who accepted its terms",
                f"Accept them at {self.endpoint}/{self.name}, then set HF_TOKEN to a token of yours.",
            ) from None
        except errors.RepositoryNotFoundError:
            raise InputError(
                f"{self.endpoint} has no model {self.name!r} that you may read",
                "Check the name; a private one needs HF_TOKEN.",
            ) from None
        except errors.RevisionNotFoundError:
            raise InputError(f"{self.name} has no revision {self.revision!r}") from None
        except Exception as error:  # the client's HTTP library changes with its releases, and its errors with it
            raise TercetError(
                f"{self.name} could not be fetched from {self.endpoint}: {_first_line(error)}",
                "What has arrived is kept: the same command continues. A mirror: HF_ENDPOINT=https://…",
            ) from None


class ModelScope:
    """ModelScope's file listing and downloads."""

    def __init__(self, name: str, revision: str):
        self.endpoint = (os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn").rstrip("/")
        self.name, self.revision = name.removeprefix(MODELSCOPE), revision

    def files(self) -> list[RemoteFile]:
        url = f"{self.endpoint}/api/v1/models/{self.name}/repo/files?Revision={self.revision}&Recursive=true"
        with open_url(url, self.name) as answer:
            found = (json.load(answer).get("Data") or {}).get("Files") or []
        return [RemoteFile(f["Path"], f.get("Size", 0), f.get("Sha256")) for f in found if f.get("Type") != "tree"]

    def missing(self, files: list[RemoteFile], folder: Path | None) -> list[RemoteFile]:
        assert folder is not None
        return [f for f in files if not self._is_whole(folder / f.path, f)]

    def fetch(self, files: list[RemoteFile], folder: Path | None, arrived: Arrived) -> Path:
        assert folder is not None
        for file in self.missing(files, folder):
            url = f"{self.endpoint}/models/{self.name}/resolve/{self.revision}/{quote(file.path)}"
            download(url, folder / file.path, file, self.name, {}, arrived)
        return folder

    def cache(self) -> Path:
        return modelscope_folder(MODELSCOPE + self.name)

    @staticmethod
    def _is_whole(path: Path, file: RemoteFile) -> bool:
        return path.is_file() and path.stat().st_size == file.size


def download(url: str, target: Path, file: RemoteFile, name: str, headers: dict[str, str], arrived: Arrived) -> None:
    """Fetch one file of a repository; a partial one lies beside it as .part and is continued.

    Raises TercetError when the connection breaks or the content is not what was announced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.is_file() else 0
    arrived(have)
    if have < file.size:
        with open_url(url, name, {**headers, **({"Range": f"bytes={have}-"} if have else {})}) as answer:
            # Without 206 the server sends the whole file again.
            with part.open("ab" if have and answer.status == 206 else "wb") as out:
                while block := answer.read(2**20):
                    out.write(block)
                    arrived(len(block))
    if part.stat().st_size < file.size:
        raise TercetError(
            f"{name}: the connection broke within {file.path}", "The same command continues where it stopped."
        )
    if file.sha256 and (got := file_sha256(part)) != file.sha256:
        part.unlink()
        raise TercetError(f"{name}: {file.path} arrived damaged (sha256 {got}, expected {file.sha256})")
    os.replace(part, target)


class _TokenStaysHome(urllib.request.HTTPRedirectHandler):
    """A redirect to another host (where the hub keeps large files) does not carry the token there."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlparse(newurl).netloc != urlparse(req.full_url).netloc:
            request.headers = {k: v for k, v in request.headers.items() if k.lower() != "authorization"}
        return request


def open_url(url: str, name: str, headers: dict[str, str] | None = None) -> Any:
    """Return the open answer. Raises InputError for what does not exist, TercetError for all else."""
    where = f"{urlparse(url).scheme}://{urlparse(url).netloc}"
    try:
        opener = urllib.request.build_opener(_TokenStaysHome)
        return opener.open(urllib.request.Request(url, headers=headers or {}), timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise InputError(f"{where} has no model {name!r}, or not with this revision") from None
        raise TercetError(f"{where} answered {error.code} for {name}") from None
    except OSError as error:
        raise TercetError(
            f"{name} could not be fetched from {where}: {_first_line(error)}",
            "What has arrived is kept: the same command continues.",
        ) from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
