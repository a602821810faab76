"""Commands run without root's right to read and write everything, which containers run tests with."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder that any user may enter (pytest's own belong to one user alone)."""
    folder = Path(tempfile.mkdtemp(prefix="tercet-case-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_unprivileged(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tercet ARGUMENTS` in `folder`; root obeys the modes of its own files there, as everybody does."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(
        [sys.executable, "-m", "tercet", *arguments],
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=_drop_rights if os.geteuid() == 0 else None,
    )


def _drop_rights() -> None:
    library = ctypes.CDLL(None)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        library.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
