"""Rates of one processor: matmul per number format, memory, copies to and from the host, the host's AdamW, disk.

Each returns FLOP/s, bytes/s or parameters/s: the median of several runs after a warm-up. The parts for cards use
torch.cuda only and have been written without one at hand.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tercet import children
from tercet.spec.cards import CardFields, bytes_of
from tercet.spec.machine import GIB

SECONDS = 0.6  # per measurement
LARGER_THAN_CACHES = 1_600_000_000  # bytes; the largest last-level cache of one socket today is 1.15 GB (EPYC 9684X)


def rate(work: float, run: Callable[[], Any], device: torch.device, seconds: float = SECONDS) -> float:
    """Return `work` over the median time of run(), which is repeated for about `seconds`."""
    run()
    _wait(device)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return work / statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_fp16_fast(device: torch.device) -> float:
    """Return FLOP/s of a card's fp16 matmul that is added up in fp16 (train.fp16_accumulation)."""
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        return matmul(device, torch.float16)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


def matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a square matmul: 8192 on a card, 1024 on a CPU."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    return rate(2.0 * n**3, lambda: a @ b, device)


def matmul_fp8(device: torch.device) -> float | None:
    """Return FLOP/s of torch._scaled_mm in e4m3, or None where the card or this PyTorch has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    n = 8192
    one = torch.ones((), device=device)
    a = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device=device).to(torch.float8_e4m3fn).t()
    try:
        return rate(
            2.0 * n**3,
            lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
            device,
        )
    except (RuntimeError, AttributeError):
        return None


def probe_bytes() -> int:
    """Return how much host memory a probe passes through: more than any server's cache, less than is free here."""
    import psutil

    return min(LARGER_THAN_CACHES, psutil.virtual_memory().available // 4)


def memory(device: torch.device) -> float:
    """Return bytes/s of a copy within the device's memory, read and written bytes together."""
    n = 2**28 if device.type == "cuda" else probe_bytes() // 2
    source, target = torch.zeros(n // 4, device=device), torch.zeros(n // 4, device=device)
    return rate(2.0 * n, lambda: target.copy_(source), device)


def host_copies(devices: list[torch.device]) -> dict[str, float]:
    """Return bytes/s per card to and from pinned host memory: alone, and the slowest when all copy at once."""
    n = 2**28
    found: dict[str, float] = {}
    hosts = {d: torch.empty(n, dtype=torch.uint8, pin_memory=True) for d in devices}
    cards = {d: torch.empty(n, dtype=torch.uint8, device=d) for d in devices}
    for d in devices:
        found[f"host_to_card_{d.index}"] = rate(n, lambda d=d: cards[d].copy_(hosts[d], non_blocking=True), d)
        found[f"card_to_host_{d.index}"] = rate(n, lambda d=d: hosts[d].copy_(cards[d], non_blocking=True), d)

    def together() -> None:
        for d in devices:
            cards[d].copy_(hosts[d], non_blocking=True)
        for d in devices:
            _wait(d)

    found["host_to_card"] = rate(n, together, torch.device("cpu"))
    return found


def cpu_adam() -> float:
    """Return parameters/s of PyTorch's fused AdamW on the host, in fp32: weight, gradient and two moments each."""
    parameters = probe_bytes() // 16
    p = torch.nn.Parameter(torch.zeros(parameters))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
    return rate(parameters, optimizer.step, torch.device("cpu"))


def disk_write(folder: Path, size: int = 2**27) -> float:
    """Return bytes/s of writing a file into `folder`, until the disk has it (fsync)."""
    block = os.urandom(2**20) * (size // 2**20)

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())

    return rate(size, write, torch.device("cpu"), seconds=0.0)


def devices() -> list[torch.device]:
    """Return the cards that PyTorch finds, in nvidia-smi's order."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return [torch.device("cuda", n) for n in range(torch.cuda.device_count())]


def card_entry(row: CardFields, device: torch.device) -> dict[str, Any]:
    """Return a card's block as gpus.toml has it, each number measured here and its source saying so."""
    found: dict[str, Any] = {
        "bandwidth_gbps": memory(device) / 1e9,
        "bf16": matmul(device, torch.bfloat16) / 1e12,
        "fp16": matmul(device, torch.float16) / 1e12,
        "fp8": (matmul_fp8(device) or 0) / 1e12,
        "reached": 1.0,  # the rates above are what large matmuls reach
        "peer_access": False,  # of this board; the machine's own measurement decides beside it
        "memory_gib": (bytes_of(row, "memory.total") or 0) / GIB,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["usable_gib"] = properties.total_memory / GIB
        found["memory_gib"] = found["memory_gib"] or found["usable_gib"]
        found["compute_capability"] = float(f"{properties.major}.{properties.minor}")
    for key, field in (("pcie_generation", "pcie.link.gen.max"), ("pcie_lanes", "pcie.link.width.current")):
        if (text := row.get(field, "")).isdigit():
            found[key] = int(text)
    with contextlib.suppress(ValueError):
        found["watts"] = float(row.get("power.limit", ""))
    numbers = {key: [value, "measured"] for key, value in found.items() if value or key == "peer_access"}
    return {"arch": "measured", **numbers}


def idle_process() -> float | None:
    """Return the bytes that a rank's process holds without a model, or None where they cannot be measured."""
    command = children.command("tercet.training.idle")
    environment = children.environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def all_rates(folder: Path) -> dict[str, float]:
    """Return every rate of this machine under the names of tercet.spec.machine.MEASURED, and more of cards."""
    cards = devices()
    device = cards[0] if cards else torch.device("cpu")
    found = {
        "matmul_fp32": matmul(device, torch.float32),
        "matmul_bf16": matmul(device, torch.bfloat16),
        "memory": memory(device),
        "cpu_adam": cpu_adam(),
        "disk_write": disk_write(folder),
    }
    if not cards and (held := idle_process()):
        found["process"] = held
    if cards:
        found["matmul_fp16"] = matmul(device, torch.float16)
        found["matmul_fp16_fast"] = matmul_fp16_fast(device)
        if fp8 := matmul_fp8(device):
            found["matmul_fp8"] = fp8
        found |= host_copies(cards)
        found["peer_access"] = float(
            all(torch.cuda.can_device_access_peer(a.index, b.index) for a in cards for b in cards if a != b)
        )
    return found
