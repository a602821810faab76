"""The collectives' self-test (E01): known sums within a time limit, and the environment that repairs them.

On some boards the driver reports peer access between cards that does not work: the first collective hangs or
returns zeros. Nothing inside the process can mend that, so the test runs in processes of its own, and the first
environment under which sums are right is remembered in the machine file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tercet import children
from tercet.errors import TercetError
from tercet.parallel.bond import die_with_parent
from tercet.spec.cards import detect_gpus

LIMIT_SECONDS = 20.0
GRACE_SECONDS = 10.0  # for the other ranks to tell what they know, after one has failed
ELEMENTS = (1024, 2**18)  # a small message and one that NCCL sends in several pieces

# Tried in this order; each keeps those before it.
REPAIRS = (
    ("NCCL_P2P_DISABLE", "1", "cards exchange data through host memory instead of reaching into each other"),
    ("NCCL_SHM_DISABLE", "1", "ranks exchange data over sockets instead of shared memory"),
)


@dataclass(frozen=True)
class Verdict:
    """kind: healthy, hang, wrong (a sum is not what it must be), error (the backend said so itself, or crashed),
    start (a process failed before it came to any collective)."""

    kind: str
    says: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.kind == "healthy"


def check_collectives(
    world: Any, timeout: float = LIMIT_SECONDS, all_reduce: Callable[[Any], Any] | None = None
) -> Verdict:
    """Run an all-reduce and an all-gather with known results on `world` (parallel.world.World) within `timeout` s.

    After a hang the calling process cannot be used any more: report it and leave by os._exit. `all_reduce` stands
    in for torch.distributed's in fault injection.
    """
    began, found = time.monotonic(), []

    def work() -> None:
        try:
            found.append(_compare(world, all_reduce))
        except Exception as error:
            found.append(("error", f"{type(error).__name__}: {_without_places(str(error))}"))

    # A thread, because a collective that hangs cannot be interrupted; a daemon, so that the process can leave.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    seconds = time.monotonic() - began
    if not found:
        return Verdict(
            "hang",
            f"rank {world.rank}: an all-reduce over {world.size} ranks did not return in {timeout:g} s",
            seconds,
        )
    return Verdict(*found[0], seconds)  # pyright: ignore[reportCallIssue]


def _without_places(text: str) -> str:
    """Return a backend's message without its place in C++ code and its advice."""
    return re.sub(r"\[\S+:\d+\] ", "", text).partition(". This is typically")[0]


def _compare(world: Any, all_reduce: Callable[[Any], Any] | None) -> tuple[str, str]:
    import torch
    import torch.distributed as dist

    if world.size == 1:
        return "healthy", "one rank: nothing to exchange"
    reduce = all_reduce or dist.all_reduce
    for n in ELEMENTS:
        # Small whole numbers: exact in fp32 in any order of adding.
        base = torch.arange(n, device=world.device, dtype=torch.float32) % 64
        value = base + world.rank
        reduce(value)
        wanted = base * world.size + world.size * (world.size - 1) / 2
        parts = [torch.empty_like(base) for _ in range(world.size)]
        dist.all_gather(parts, base + world.rank)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        if not torch.equal(value, wanted):
            bad = int((value != wanted).sum())
            return (
                "wrong",
                f"rank {world.rank}: an all-reduce of {n} numbers returned {bad} wrong sums "
                f"(the first is {value[0].item():g} and must be {wanted[0].item():g})",
            )
        for r, part in enumerate(parts):
            if not torch.equal(part, base + r):
                return "wrong", f"rank {world.rank}: an all-gather returned wrong data of rank {r}"
    return "healthy", "sums and gathered data are right"


# --------------------------------------------------------------------------------------------------- the repair


def find_working_environment(
    attempt: Callable[[dict[str, str]], Verdict], say: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """Return the variables under which `attempt(variables)` is healthy; {} when nothing needed repair.

    Says what was wrong and what is set against it. Raises TercetError when no known repair helps.
    """
    variables: dict[str, str] = {}
    verdict = attempt(variables)
    for name, value, meaning in REPAIRS:
        if verdict.ok:
            return variables
        if verdict.kind == "start":
            raise TercetError(f"the self-test of collectives could not begin: {verdict.says}")
        variables = {**variables, name: value}
        say(f"self-test failed: {verdict.says}\n  setting {name}={value}: {meaning}; testing again")
        verdict = attempt(variables)
    if verdict.ok:
        return variables
    tried = ", ".join(f"{k}={v}" for k, v in variables.items())
    raise TercetError(
        f"collectives do not work on this machine: {verdict.says} (also with {tried})",
        "Run `tercet doctor`; use one card meanwhile: --ranks 1.",
    )


def run_check(
    ranks: int,
    timeout: float,
    variables: dict[str, str],
    entry: Sequence[str] = ("-P", "-m", "tercet.probe.selftest"),
) -> Verdict:
    """Start `ranks` processes that test their collectives; return the worst verdict. Leaves no process behind."""
    with tempfile.TemporaryDirectory(prefix="tercet-selftest-") as folder:
        command = [sys.executable, *entry, folder, str(timeout), str(os.getpid())]
        processes = start_ranks(ranks, command, variables, Path(folder))
        wait_for_all(processes, timeout + 60)  # the processes watch their own limit; starting them takes time too
        verdicts = [_verdict(Path(folder), rank, process.returncode) for rank, process in enumerate(processes)]
    bad = [v for v in verdicts if not v.ok]
    # What says most comes first: a wrong sum or an error, not the hang that it caused elsewhere.
    return sorted(bad, key=lambda v: ("start", "wrong", "error", "hang").index(v.kind))[0] if bad else verdicts[0]


def _verdict(folder: Path, rank: int, code: int) -> Verdict:
    file = folder / f"verdict-{rank}.json"
    if file.exists():
        return Verdict(**json.loads(file.read_text(encoding="utf-8")))
    said = last_words(folder / f"output-{rank}")
    text = f"rank {rank} ended with code {code} before it could report" + (f":\n{said}" if said else "")
    # A Python error before the test says nothing of collectives; a crash (SIGSEGV) may be theirs.
    kind = "start" if code > 0 else "hang" if code == -signal.SIGKILL else "error"
    return Verdict(kind, text, 0.0)


def start_ranks(
    ranks: int, command: Sequence[str], variables: dict[str, str], folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Start `ranks` processes of one command; what rank N prints goes to FOLDER/output-N."""
    environment = children.environment({**variables, "WORLD_SIZE": str(ranks)})
    processes = []
    for rank in range(ranks):
        with (folder / f"output-{rank}").open("wb") as output:
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    command, env=environment | numbers, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )
    return processes


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> None:
    """Wait until all have ended, for `limit` seconds, or a few after one has failed; end those that still run."""
    deadline, failed = time.monotonic() + limit, False
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if not failed and any(p.returncode for p in processes):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.02)
    finally:
        # All before any is waited for: a rank that sees another one go would report that as its own error.
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def last_words(output: Path, lines: int = 6) -> str:
    """Return the end of what a process printed: its error. Empty when it printed nothing."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return "\n".join(text.strip().splitlines()[-lines:])


def environment_for(ranks: int, say: Callable[[str], None] = lambda text: None) -> dict[str, str]:
    """Return the variables that collectives on this machine need; tests once and remembers (machine file).

    On a CPU, or with one rank, nothing is tested: gloo has no peer access to get wrong.
    """

    cards = detect_gpus()
    if ranks < 2 or len(cards) < 2:
        return {}
    fingerprint = f"{ranks}x {cards[0]['name']}, driver {cards[0].get('driver_version', '?')}"
    known = remembered()
    if known.get("fingerprint") == fingerprint:
        return dict(known["environment"])
    variables = find_working_environment(lambda v: run_check(ranks, LIMIT_SECONDS, v), say)
    remember({"fingerprint": fingerprint, "environment": variables})
    return variables


def remembered() -> dict[str, Any]:
    from tercet.spec.machine import read_machine_file

    return (read_machine_file() or {}).get("collectives", {})


def remember(collectives: dict[str, Any]) -> None:
    from tercet.probe.machine_file import update

    update({"collectives": collectives})


def main(folder: str, timeout: float, parent: int, all_reduce: Callable[[Any], Any] | None = None) -> None:
    """Entry of one test process: join, check, write the verdict, leave whatever still hangs."""
    die_with_parent(parent)
    from tercet.parallel.world import open_world

    world = open_world(timeout + 30, store_file=f"{folder}/store")
    verdict = check_collectives(world, timeout, all_reduce)
    Path(folder, f"verdict-{world.rank}.json").write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    os._exit(0 if verdict.ok else 1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
