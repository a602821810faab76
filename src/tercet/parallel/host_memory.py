"""Host memory that the ranks of one machine share, and that a card can read and write without a detour.

Shared memory is a file without a name (memfd): it needs no space in /dev/shm, which containers keep small, and is gone
with the last process that maps it, however that ends. PyTorch's own pinned blocks are rounded up to powers of two, so
memory is registered with the card's driver where it lies.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from typing import Any

import torch
from torch import Tensor

from tercet.errors import NotLegalError, TercetError
from tercet.parallel.world import World


def own(elements: int, dtype: torch.dtype, world: World) -> Tensor:
    """Return zeros in this rank's host memory."""
    return torch.zeros(elements, dtype=dtype, device=world.host)


def shared(elements: int, dtype: torch.dtype, world: World) -> Tensor:
    """Return zeros in host memory that is one for all ranks. Every rank must call it alike."""
    if world.size == 1 or world.host.type != "cpu":  # a rehearsal's host holds shapes only
        return own(elements, dtype, world)
    size = max(1, elements) * dtype.itemsize
    file, path = _new_file(size) if world.rank == 0 else (-1, "")
    places = world.meet((socket.gethostname(), path))
    if len({host for host, _ in places}) > 1:
        raise NotLegalError(
            [
                f"strategy=host shares one machine's memory, and the ranks run on {', '.join(sorted({h for h, _ in places}))}"
            ]
        )
    if world.rank:
        file = os.open(places[0][1], os.O_RDWR)
    mapped = mmap.mmap(file, size)
    world.meet()  # all have opened it
    os.close(file)
    if world.rank == 0 and not path.startswith("/proc/"):
        os.unlink(path)
    return torch.frombuffer(mapped, dtype=dtype, count=elements)


def _new_file(size: int) -> tuple[int, str]:
    """Return (descriptor, a path by which this machine's other processes open it) of a file full of zeros."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("tercet")
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="tercet-")
    os.ftruncate(file, size)
    return file, path


def pin(memory: Tensor, device: torch.device) -> Tensor:
    """Register memory with the card's driver, in place, so that copies need not wait; return it."""
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)  # 1: for every card
        if int(error):
            raise TercetError(
                f"the driver cannot register {memory.nbytes} bytes of host memory (cudaHostRegister: error {int(error)})",
                "Allow more locked memory (ulimit -l unlimited), or add host RAM.",
            )
    elif device.type != "cpu":
        register = getattr(torch.get_device_module(device), "host_register", None)
        if register is not None:
            register(memory)
    return memory
