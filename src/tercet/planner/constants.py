"""The few numbers that data sheets do not hold. Each has a physical meaning; `calibrate.py` fits them.

The fitted values lie in constants.toml, with the number of runs they stand on.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from tercet.spec.machine import Machine


@dataclass(frozen=True)
class Constants:
    """Shares are of the data sheet's figure. `prior` is where the fit starts and what it is drawn to."""

    # --- arithmetic
    matmul_share: float = field(default=0.95, metadata={"what": "large matmuls, of the card's `reached` rate"})
    # GeForce peaks are quoted at the guaranteed boost clock (4090: 2.52 GHz); cards run at 2.7 to 2.8.
    matmul_share_geforce: float = field(default=1.05, metadata={"what": "the same on GeForce cards"})
    matmul_traffic: float = field(default=0.50, metadata={"what": "matmul operand traffic not hidden by arithmetic"})
    attention_share: float = field(default=0.55, metadata={"what": "flash attention, of the reached matmul rate"})
    attention_share_hopper: float = field(default=0.40, metadata={"what": "the same on Hopper without FA3"})
    fast_share: float = field(default=0.60, metadata={"what": "fp16 accumulation, of twice the rate"})
    fp8_share: float = field(default=0.75, metadata={"what": "fp8 matmuls, of their peak, scaling included"})
    int8_share: float = field(default=0.70, metadata={"what": "int8 matmuls, of their peak, scaling included"})
    expert_share: float = field(default=0.60, metadata={"what": "grouped expert matmuls, of plain ones"})
    # --- memory-bound work
    bandwidth_share: float = field(default=0.80, metadata={"what": "elementwise kernels, of memory bandwidth"})
    nf4_traffic: float = field(default=2.0, metadata={"what": "passes over the dequantised weight per use"})
    launch_seconds: float = field(default=9e-6, metadata={"what": "host time per kernel of eager PyTorch"})
    windows_launch: float = field(default=3.5, metadata={"what": "the same under Windows' display driver, times this"})
    # --- links
    staged_bus: float = field(default=8.0e9, metadata={"what": "collective between two cards through the host, B/s"})
    staged_total: float = field(default=18e9, metadata={"what": "what the host's memory carries for all cards, B/s"})
    peer_share: float = field(default=0.75, metadata={"what": "collectives over NVLink or peer PCIe, of the link"})
    copies_share: float = field(default=0.60, metadata={"what": "copy-engine collectives, of each card's host link"})
    host_share: float = field(default=0.70, metadata={"what": "copies between host and card while training"})
    overlap: float = field(default=0.60, metadata={"what": "communication that computing can hide"})
    cpu_adam: float = field(default=1.2e9, metadata={"what": "parameters per second, AdamW on the host"})
    nvme_rate: float = field(default=3e9, metadata={"what": "files on an unmeasured NVMe drive, B/s (an assumption)"})
    pipeline_share: float = field(default=0.92, metadata={"what": "round-robin pipeline's time spent computing"})
    # --- memory
    reserve_share: float = field(default=0.08, metadata={"what": "PyTorch reserved beyond allocated, of allocated"})
    full_logits_bytes: float = field(default=16.0, metadata={"what": "bytes per logit of an unfused loss at its peak"})
    chunked_logits_bytes: float = field(default=4.0, metadata={"what": "bytes per logit of a chunked or compiled loss"})
    activation_scale: float = field(default=1.0, metadata={"what": "activations kept by eager systems, of derived"})
    # --- a CPU as the device: no published run; starts at first-light's figures, then `tercet calibrate`
    cpu_share: float = field(default=1.0, metadata={"what": "matmuls and memory traffic, of what doctor measured"})
    cpu_process_bytes: float = field(default=400e6, metadata={"what": "a rank's process with PyTorch, without tensors"})
    cpu_heap_share: float = field(default=0.5, metadata={"what": "freed blocks the C library keeps, of a step's work"})


NAMES = tuple(f.name for f in fields(Constants))

# Not fitted. LLMQ's allocator report on a 4090 (benchmarks README): 483 MiB are the driver's and the context's.
CONTEXT_BYTES = 483 * 2**20
# NCCL's channel buffers and kernels: measured differences between one and several ranks lie near this.
COLLECTIVE_BYTES = 300 * 2**20
# An idle rank's process on a CPU grows by this in a run: its group, evaluations, samples, saves. Measured on first-light
# with 3 ranks, in two installs of the same versions whose idle processes held 349 and 410 MiB.
GROWN_BYTES = 56 * 10**6


@cache
def load() -> Constants:
    """Return the shipped constants."""
    return Constants(**_file()["values"])


def load_for(machine: Machine) -> Constants:
    """Return the constants for a machine: the shipped ones, what tercet doctor measured in place of one, and what the
    machine's own finished runs have corrected.
    """
    return replace(before_runs(machine), **{k: v for k, v in machine.corrections.items() if k in NAMES})


def before_runs(machine: Machine) -> Constants:
    """Return the constants for a machine of which no run is known."""
    held = machine.measured.get("process")
    return load() if held is None else replace(load(), cpu_process_bytes=held + GROWN_BYTES)


@cache
def load_foreign() -> Constants:
    """Return the constants of hand-written systems; only bench/plan_truth.py predicts those."""
    return Constants(**_file().get("foreign", _file()["values"]))


@cache
def about() -> dict[str, Any]:
    """Return what the fit stands on: rows, sources, errors in cross-validation."""
    return _file().get("about", {})


@cache
def ranges() -> dict[str, Any]:
    """Return the half-widths of ranges (planner/ranges.py) and the cards that have measured rows."""
    return _file().get("ranges", {})


def _file() -> dict[str, Any]:
    path = resources.files("tercet.planner") / "constants.toml"
    if not path.is_file():
        return {"values": {}}
    return tomllib.loads(path.read_text(encoding="utf-8"))
