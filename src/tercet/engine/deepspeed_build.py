"""DeepSpeed's compiled CPU optimizer: built once, before any rank starts, or replaced by PyTorch's. Loads no torch.

DeepSpeed compiles it inside the training job at its first use, in every rank at once, and ends the job when it
cannot. Here the build happens beforehand under a lock, in a process of its own, with its output in a file.
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

from tercet.errors import InputError

BUILD = (
    "from deepspeed.ops.op_builder import CPUAdamBuilder\n"
    "module = CPUAdamBuilder().load(verbose=True)\n"
    "print('built', module.__file__)\n"
)
LIMIT_SECONDS = 900


def require_deepspeed() -> None:
    """Raise InputError, with the way to install it, when DeepSpeed is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "strategy.engine is deepspeed, but DeepSpeed is not installed",
            'Install it with: pip install "tercet[deepspeed]"; or set strategy.engine=native.',
        )


def missing_tools() -> list[str]:
    """Return a sentence for everything that the build of the CPU optimizer lacks on this machine."""
    why = []
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0], path=search_path()) is None:
        why.append(f"no C++ compiler: {compiler} is not on the PATH (Debian, Ubuntu: apt-get install g++)")
    if shutil.which("ninja", path=search_path()) is None:
        why.append("no ninja (pip install ninja)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        why.append("Python.h is missing (Debian, Ubuntu: apt-get install python3-dev)")
    return why


def search_path() -> str:
    """Return the PATH, with the scripts of this Python behind it: a ninja from pip lies there."""
    return os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])


def record_file() -> Path:
    """Return where the result of the build is remembered, for these versions and this processor."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tercet" / "deepspeed"
    versions = "-".join(importlib.metadata.version(name) for name in ("deepspeed", "torch"))
    return base / f"cpu-adam-{versions}-py{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}.json"


def adam_is_ready() -> bool:
    """Return whether the compiled CPU optimizer has been built and is still there."""
    try:
        library = json.loads(record_file().read_text(encoding="utf-8"))["library"]
    except (OSError, ValueError, KeyError):
        return False
    return Path(library).is_file() and not missing_tools()  # loading it asks ninja whether it is up to date


def ensure_adam(say: Callable[[str], None], command: Sequence[str] = (sys.executable, "-c", BUILD)) -> bool:
    """Build the CPU optimizer unless it is there, and return whether it can be used; says what happens.

    Only one process builds; others that come meanwhile wait for it and find the result.
    """
    slower = "the optimizer runs on the host through PyTorch's AdamW, which is slower"
    if why := missing_tools():
        say(f"DeepSpeed's CPU optimizer cannot be compiled here ({'; '.join(why)}): {slower}")
        return False
    record = record_file()
    record.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{record}.lock"):
        if adam_is_ready():
            return True
        say("compiling DeepSpeed's CPU optimizer, once; this takes about a minute …")
        log = record.with_suffix(".log")
        library = _build(command, log)
        if library is None:
            say(f"the compilation failed (see {log}): {slower}")
            return False
        record.write_text(json.dumps({"library": library}), encoding="utf-8")
        say("compiled")
    return True


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


def prepare(offload_optimizer: str, say: Callable[[str], None]) -> None:
    """Do what must be done before the ranks of a DeepSpeed run start. Raises InputError without DeepSpeed."""
    require_deepspeed()
    if offload_optimizer != "none":
        ensure_adam(say)
