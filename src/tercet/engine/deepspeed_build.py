"""DeepSpeed's compiled library for files on NVMe: checked, and built once, before any rank starts. Loads no torch.

DeepSpeed compiles such a library inside the training job at its first use, in every rank at once, and ends the job
when it cannot. Here the build happens beforehand under a lock, in a process of its own, with its output in a file.
Its CPU optimizer is not used, so nothing else needs a compiler (docs/decisions/0052).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from tercet.errors import InputError, NotLegalError

BUILD = (
    "from deepspeed.ops.op_builder import AsyncIOBuilder\n"
    "module = AsyncIOBuilder().load(verbose=True)\n"
    "print('built', module.__file__)\n"
)
HEADERS = ("/usr/include", "/usr/local/include")
LIMIT_SECONDS = 900


def require_deepspeed() -> None:
    """Raise InputError, with the way to install it, when DeepSpeed is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "strategy.engine is deepspeed, but DeepSpeed is not installed",
            'Install it with: pip install "tercet[deepspeed]"; or set strategy.engine=native.',
        )


def missing_tools() -> list[str]:
    """Return a sentence for everything that the build lacks on this machine."""
    why = []
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0], path=search_path()) is None:
        why.append(f"no C++ compiler: {compiler} is not on the PATH (Debian, Ubuntu: apt-get install g++)")
    if shutil.which("ninja", path=search_path()) is None:
        why.append("no ninja (pip install ninja)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        why.append("Python.h is missing (Debian, Ubuntu: apt-get install python3-dev)")
    if not any((Path(folder) / "libaio.h").is_file() for folder in HEADERS):
        why.append("libaio.h is missing (Debian, Ubuntu: apt-get install libaio-dev)")
    return why


def search_path() -> str:
    """Return the PATH, with the scripts of this Python behind it: a ninja from pip lies there."""
    return os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])


def record_file() -> Path:
    """Return where the result of the build is remembered, for these versions and this processor."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tercet" / "deepspeed"
    versions = "-".join(importlib.metadata.version(name) for name in ("deepspeed", "torch"))
    return base / f"async-io-{versions}-py{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}.json"


def is_built() -> bool:
    """Return whether the library has been built and is still there."""
    try:
        library = json.loads(record_file().read_text(encoding="utf-8"))["library"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return Path(library).is_file()


def ensure_built(say: Callable[[str], None], command: Sequence[str] = (sys.executable, "-c", BUILD)) -> None:
    """Build the library unless it is there; says what happens. Raises NotLegalError with every cause it cannot be.

    Only one process builds; others that come meanwhile wait for it and find the result.
    """
    record = record_file()
    record.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{record}.lock"):
        if is_built():
            return
        if why := missing_tools():
            raise NotLegalError([f"strategy.offload: nvme needs a library that must be compiled here: {w}" for w in why])
        say("compiling DeepSpeed's library for NVMe, once; this takes a minute or two …")
        log = record.with_suffix(".log")
        library = _build(command, log)
        if library is None:
            raise NotLegalError(
                [f"strategy.offload: nvme: DeepSpeed's library did not compile; its log is {log}; offload to cpu works"]
            )
        record.write_text(json.dumps({"library": library}), encoding="utf-8")
        say("compiled")


def _build(command: Sequence[str], log: Path) -> str | None:
    """Run the build; return the library's path, or None. Its last line says `built PATH`."""
    environment = {**os.environ, "PATH": search_path()}
    environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with log.open("wb") as output:
        try:
            subprocess.run(
                list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, timeout=LIMIT_SECONDS, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return None
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("built "):
            return line.removeprefix("built ")
    return None


def prepare(offloads: Sequence[str], say: Callable[[str], None]) -> None:
    """Do what must be done before the ranks of a DeepSpeed run start.

    offloads: where optimizer and weights go. Raises InputError without DeepSpeed, NotLegalError without the build.
    """
    require_deepspeed()
    if "nvme" in offloads:
        ensure_built(say)
