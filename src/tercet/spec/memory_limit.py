"""How much host memory this process may really have: a container's or group's limit, ulimit -v, or all there is.

Sources: Documentation/admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst (memory.limit_in_bytes) of the
Linux kernel; setrlimit(2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number of pages near 2**63


@dataclass(frozen=True)
class MemoryLimit:
    """`bytes` for all ranks together; `source` says who sets it, in words that fit after "limited by"."""

    bytes: int
    source: str


def memory_limit(ranks: int = 1, root: Path = Path("/")) -> MemoryLimit | None:
    """Return the smallest limit below the machine's own memory that holds for this process and its children."""
    limits = [*_groups(root), *_process(ranks)]
    return min(limits, key=lambda limit: limit.bytes, default=None)


def _groups(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control group and of every group above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path is often the host's; then the container's own group is at the top.
        for folder in (group, *group.parents) if group.is_dir() else (base,):
            if folder.is_relative_to(base) and (limit := _number(folder / file)) is not None:
                yield MemoryLimit(limit, f"the control group of this process ({folder / file})")


def _number(file: Path) -> int | None:
    try:
        value = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None
    return value if value < NO_LIMIT_BYTES else None


def _process(ranks: int) -> Iterator[MemoryLimit]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for number, flag in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and soft < NO_LIMIT_BYTES:
            yield MemoryLimit(soft * ranks, f"ulimit -{flag} ({soft // 1024} KiB for each process)")
