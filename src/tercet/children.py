"""How processes of our own are started: nothing from the working directory is imported.

A file such as random.py or queue.py beside the data would otherwise be imported in place of Python's, by the ranks
and by whatever they start: wrong, and a stranger's code. `python -P` and PYTHONSAFEPATH keep the folder out; the
variable reaches what libraries start too (compilers of kernels, launchers).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours in a new process."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for a child, with `variables` set."""
    found = {**os.environ, "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in found:
        # An empty entry (PYTHONPATH=:/some/folder) means the working directory; nobody writes that on purpose.
        found["PYTHONPATH"] = os.pathsep.join(p for p in found["PYTHONPATH"].split(os.pathsep) if p not in ("", "."))
    # Cards are numbered as nvidia-smi numbers them, which is what was planned and measured.
    found.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return found | dict(variables or {})


def leave_out_working_directory() -> None:
    """Take the working directory out of this process's import path (`python -m tercet` puts it first)."""
    os.environ["PYTHONSAFEPATH"] = "1"  # for what libraries start from this process
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been removed; nothing can be imported from it
        return
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # whoever names it in full means it
        sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != here]
