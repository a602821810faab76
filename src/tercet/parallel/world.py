"""World: who takes part. At size 1 there is no process group and every sum is the identity."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tercet.errors import InputError, TercetError
from tercet.locks import kernel_locks_in
from tercet.parallel.jobs import Jobs, ThreadedJobs
from tercet.spec.mesh import AXES, Mesh

WITHOUT_A_CLOCK = timedelta(days=365)
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MEETING_POLL_SECONDS = 0.05
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This rank among all. `mesh` says where it stands; until a strategy is known, all ranks are replicas.

    `groups` holds the process groups of those axes that are neither one rank nor all (parallel/mesh.py makes them).
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    patient: Any = None  # a process group without a clock, for meet()

    def __post_init__(self) -> None:
        if self.mesh == Mesh():
            object.__setattr__(self, "mesh", Mesh(data=self.size))

    @property
    def data_rank(self) -> int:
        """Which share of each batch this rank computes, of `mesh.data_ranks`."""
        return self.mesh.data_rank(self.rank)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ along these axes alone; None is PyTorch's name for all ranks.

        Ask only where `mesh.size(axes)` exceeds 1.
        """
        return None if self.mesh.size(axes) == self.size else self.groups[axes]

    def sum(self, values: torch.Tensor, over: tuple[str, ...] = AXES) -> torch.Tensor:
        """Sum a small CPU tensor over the ranks of some axes, in place, and return it."""
        if self.mesh.size(over) > 1:
            dist.all_reduce(values, group=self.group(over))
        return values

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so; every rank gets the same answer."""
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def gather(self, value: Any, over: tuple[str, ...] = AXES) -> list[Any]:
        """Return the value of every rank of some axes, in rank order, on each of them. For small plain data."""
        size = self.mesh.size(over)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=self.group(over))
        return values

    @property
    def host(self) -> torch.device:
        """Where host memory is; a rehearsal's has no values."""
        return torch.device("cpu")

    def jobs(self) -> Jobs:
        """Return who does the host's work beside the card's: a thread where there is a card."""
        return ThreadedJobs() if self.device.type == "cuda" else Jobs()

    def partners(self) -> dist.ProcessGroup | None:
        """Return a new group of all ranks for work beside the loop's own, without a clock; None at size 1."""
        if self.size == 1:
            return None
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=WITHOUT_A_CLOCK))

    def barrier(self) -> None:
        # A sum of a CPU number, not dist.barrier(): that one picks a GPU by itself under NCCL.
        self.any(False)

    def meet(self, value: Any = None) -> list[Any]:
        """Wait until every rank is here, however long it takes; return every rank's value as gather() does.

        For after work whose length differs between ranks: one rank writes, hashes, loads or prepares while others
        have nothing to do. They must not wait in an ordinary collective, whose clock takes waiting for a fault.
        A rank that ends is noticed here too: its connections close.
        """
        if self.size == 1:
            return [value]
        arrived = cast(dist.Work, dist.all_reduce(torch.zeros(1), group=self.patient, async_op=True))
        pause = 0.0
        while not arrived.is_completed():  # not in its wait(): there a signal would not be seen
            time.sleep(pause)
            pause = min(pause + 0.001, 0.05)
        arrived.wait()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.patient)
        return values


def launch_variables(meeting_point: bool = True) -> dict[str, int] | None:
    """Return rank, size and local rank from the launcher's environment, or None when there was no launcher.

    Raises InputError when only a part is set or the numbers cannot be true.
    """
    wanted = NUMBERS + (MEETING_POINT if meeting_point else ())
    present = {name: os.environ[name] for name in wanted if os.environ.get(name)}
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return None
    if missing := [name for name in wanted if name not in present]:
        raise InputError(
            f"the launcher set {', '.join(present)} but not {', '.join(missing)}",
            "Start with tercet train alone, or with torchrun, which sets all of them.",
        )
    numbers = {}
    for name in NUMBERS:
        try:
            numbers[name] = int(present[name])
        except ValueError:
            raise InputError(f"{name} is {present[name]!r}; it must be a whole number") from None
    if not 0 <= numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise InputError(f"RANK is {numbers['RANK']} but WORLD_SIZE is {numbers['WORLD_SIZE']}")
    return numbers


def open_world(timeout_seconds: float, store_file: str | None = None) -> World:
    """Join the process group that the launcher's environment names; alone, without one, make none.

    With `store_file` the ranks meet in that file instead of at a port, so two jobs never want the same one.
    """
    os.environ.setdefault(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
    )  # as nvidia-smi numbers the cards, which is what was planned
    numbers = launch_variables(meeting_point=store_file is None) or dict(zip(NUMBERS, (0, 1, 0), strict=True))
    rank, size, local = (numbers[name] for name in NUMBERS)
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise InputError(
                f"rank {rank} is number {local} on this machine, which has {torch.cuda.device_count()} cards",
                "Start at most one rank per card: --ranks N.",
            )
        # Blocks of ever other sizes would leave holes: the allocator grows what it has instead. Read at the first use.
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # small agreements go over gloo and never wait for the card
    else:
        device, backend = torch.device("cpu"), "gloo"
    if size > 1:
        store = _meeting(Path(store_file), rank, size, timeout_seconds) if store_file else None
        # No device_id: with it torch 2.13 splits NCCL's communicator on the ranks outside a new gloo group, and not on
        # those inside. What it is for is had without: the card is set above, and no barrier goes over NCCL.
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds)
            )
        except dist.DistNetworkError as error:
            raise _no_meeting(rank, error) from None
    patient = dist.new_group(backend="gloo", timeout=WITHOUT_A_CLOCK) if size > 1 else None
    return World(rank, size, local, device, patient=patient)


def _meeting(file: Path, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the store where ranks of one machine meet: a file, or a loopback port where files cannot be locked."""
    if kernel_locks_in(file.parent):
        return dist.FileStore(str(file), size)
    note, timeout = file.with_name(f"{file.name}.port"), timedelta(seconds=timeout_seconds)
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        temporary = note.with_suffix(".tmp")
        temporary.write_text(str(port), encoding="ascii")
        temporary.replace(note)
        return store
    deadline = time.monotonic() + timeout_seconds
    while not note.exists():
        if time.monotonic() > deadline:
            raise TercetError(f"rank {rank}: rank 0 did not open its port within {timeout_seconds:g} s")
        time.sleep(MEETING_POLL_SECONDS)
    return dist.TCPStore("127.0.0.1", int(note.read_text(encoding="ascii")), size, False, timeout)


def _no_meeting(rank: int, error: Exception) -> InputError:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    first = str(error).strip().splitlines()[0]
    if "EADDRINUSE" in str(error):
        return InputError(
            f"MASTER_PORT {port} is in use on this machine{_owner(port)}, so rank {rank} cannot open it",
            "Give every rank another, for example MASTER_PORT=29511; or start with tercet train or "
            "torchrun --standalone, which need none.",
        )
    return InputError(
        f"rank {rank} cannot meet the others at MASTER_ADDR {address}, MASTER_PORT {port}: {first}",
        "Rank 0 must run on that machine, be reachable on that port, and be started at about the same time.",
    )


def _owner(port: str) -> str:
    """Return ", by process N (name)" when the system tells who listens on a port, else ""."""
    import psutil

    try:
        found = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == int(port)  # pyright: ignore[reportAttributeAccessIssue]
        ]
        pid = next(c.pid for c in found if c.pid)
        return f", by process {pid} ({psutil.Process(pid).name()})"
    except (psutil.Error, ValueError, StopIteration, OSError):
        return ""


def close_world(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def is_collective_failure(error: BaseException) -> bool:
    """Return whether an error is only the echo of another rank's end: a broken or timed-out collective."""
    if isinstance(error, dist.DistBackendError):
        return True
    text = str(error).lower()
    signs: Sequence[str] = (
        "connection closed by peer",
        "connection reset by peer",
        "timed out waiting",
        "gloo/transport",
        "nccl",
        "broken pipe",
        "application timeout",
        "socket timeout",
        "heartbeat",
    )
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
