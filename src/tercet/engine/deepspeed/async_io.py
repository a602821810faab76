"""DeepSpeed's library for files on NVMe: whether it can be had here, built once before the ranks start, then loaded.

DeepSpeed would compile it inside every rank at its first use, behind a lock that a killed process leaves for ever.
Here one process builds it, under a lock that the kernel drops, into a folder named after the versions; the ranks
only load the finished file (docs/decisions/0057). No torch here: the supervisor asks too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tercet import children
from tercet.engine.deepspeed.installed import require_deepspeed
from tercet.errors import InputError
from tercet.locks import FileLock
from tercet.places import cache_folder

LIBRARIES = ("pin_memory", "async_io")  # the first holds what the second uses
POLL_SECONDS = 0.5
CPU_INSTEAD = "or keep the state in host memory: strategy.offload.optimizer=cpu strategy.offload.weights=cpu"


def built_in() -> Path:
    """Return the folder of the built libraries: of these versions of Python, torch and DeepSpeed."""
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / "extensions" / f"{python}-torch-{version('torch')}-deepspeed-{version('deepspeed')}"


def library(name: str) -> Path:
    return built_in() / f"{name}.so"


def is_built() -> bool:
    try:
        return all(library(name).exists() for name in LIBRARIES)
    except InputError:  # a user without a home folder has built nothing
        return False


def tools() -> dict[str, str | None]:
    """Return compiler, ninja and libaio.h, by path; None where one is missing. ninja may lie beside this Python."""
    here = str(Path(sys.executable).parent)
    headers = (Path(base, "libaio.h") for base in ("/usr/include", "/usr/local/include"))
    return {
        "compiler": shutil.which(os.environ.get("CXX") or "g++"),
        "ninja": shutil.which("ninja", path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}"),
        "libaio": next((str(p) for p in headers if p.exists()), None),
    }


def why_not_here() -> list[str]:
    """Return what is missing to build it, each with the way to get it; empty when it is built or can be."""
    if is_built():
        return []
    advice = {
        "compiler": "no C++ compiler (apt install g++)",
        "ninja": "no ninja (pip install ninja)",
        "libaio": "no libaio.h (apt install libaio-dev)",
    }
    return [advice[name] for name, path in tools().items() if path is None]


def ensure_built(say: Callable[[str], None], progress: Callable[[int, int, str], None]) -> None:
    """Build what is not built yet; whoever comes meanwhile waits. Raises InputError with the reason when it fails."""
    require_deepspeed()
    if is_built():
        return
    folder = built_in()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock").held():
        if is_built():  # by the process that we waited for
            return
        if missing := why_not_here():
            raise InputError(
                f"offload to nvme needs DeepSpeed's asynchronous file access, which cannot be built: {'; '.join(missing)}",
                f"Install that, {CPU_INSTEAD}",
            )
        say(f"building DeepSpeed's asynchronous file access, once for this machine (minutes), into {folder}")
        _build(folder, progress)


def _build(folder: Path, progress: Callable[[int, int, str], None]) -> None:
    here = str(Path(sys.executable).parent)
    # A build folder of our own: what another process was killed in, torch's own lock included, is not in it.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
        variables = {"TORCH_EXTENSIONS_DIR": work, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
        environment = children.environment(variables)
        log = Path(work, "log")
        begin = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                children.command("tercet.engine.deepspeed.async_io"),
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    made = sum(1 for _ in Path(work).glob("*/*.o"))
                    progress(made, _sources(), f"compiling asynchronous file access, {time.monotonic() - begin:.0f} s")
                    time.sleep(POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            lines = log.read_text(errors="replace").splitlines()
            told = [line for line in lines if "error" in line.lower()] or lines
            raise InputError(
                "building DeepSpeed's asynchronous file access failed:\n" + "\n".join(told[-8:]),
                f"Mend that, {CPU_INSTEAD}",
            )
        for name in LIBRARIES:  # the last one marks the whole as done
            os.replace(Path(work, name, f"{name}.so"), library(name))


def _sources() -> int:
    """Return the files to compile, as DeepSpeed's own folders have them."""
    found = importlib.util.find_spec("deepspeed")
    base = Path(next(iter(found.submodule_search_locations or ()))) if found else Path()
    return max(
        1, sum(1 for _ in base.glob("ops/csrc/aio/**/*.cpp")) + sum(1 for _ in base.glob("ops/csrc/pin_memory/*.cpp"))
    )


def load_libraries() -> None:
    """Give DeepSpeed the built libraries, so that it neither looks for a compiler nor compiles. Raises InputError."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    if not is_built():
        raise InputError(
            "DeepSpeed's asynchronous file access is not built", "tercet train builds it before its ranks start."
        )
    loaded = OpBuilder._loaded_ops  # what a builder's load() returns without building
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):
        if builder.name not in loaded:
            loaded[builder.name] = _module(builder.name)
        builder.load(verbose=False)  # makes the first one's symbols visible to the second


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, library(name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_direct_files(folder: Path) -> None:
    """Raise InputError when files in `folder` cannot be read and written past the page cache, as the library does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"strategy.offload.nvme_path: {folder} cannot be made: {error.strerror}") from None
    path = folder / f"direct-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))  # Linux, as libaio is
    except OSError as error:
        raise InputError(
            f"strategy.offload.nvme_path: the file system of {folder} has no direct access (O_DIRECT: {error.strerror})",
            "tmpfs and some network file systems have none; name a folder on a local drive.",
        ) from None
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    """Compile both, in a process of its own."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]

    AsyncIOBuilder().load(verbose=True)


if __name__ == "__main__":
    main()
