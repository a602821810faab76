"""What this machine is: cards, drivers, memory, disk, compilers. Asks programs and files; loads no torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tercet.engine.deepspeed import async_io
from tercet.spec.cards import detect_gpus
from tercet.units import show_bytes


@dataclass(frozen=True)
class Finding:
    """level: ok, note, warning. `advice` says what to do about it."""

    level: str
    what: str
    advice: str = ""


def inventory(folder: Path) -> dict[str, Any]:
    """Return the machine in plain values; None where a thing is not there. `folder` is where runs will be written."""
    import psutil

    disk = shutil.disk_usage(folder)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "deepspeed", "accelerate", "triton")},
        "cores": os.cpu_count(),
        "host_bytes": psutil.virtual_memory().total,
        "host_available_bytes": psutil.virtual_memory().available,
        "swap_bytes": psutil.swap_memory().total,
        "shared_memory_bytes": _shared_memory(),
        "disk_free_bytes": disk.free,
        "cards": detect_gpus(),
        "topology": _output(["nvidia-smi", "topo", "-m"]),
        "nvlink": _output(["nvidia-smi", "nvlink", "--status"]),
        "cuda_home": os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"),
        "nvcc": _version_line(["nvcc", "--version"], "release"),
        "compiler": _version_line([os.environ.get("CXX") or "g++", "--version"], ""),
        "ninja": _version_line([async_io.tools()["ninja"] or "ninja", "--version"], ""),
        "libaio": async_io.tools()["libaio"] is not None,
        "async_io_built": _version("deepspeed") is not None and async_io.is_built(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _output(command: list[str]) -> str | None:
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        run = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def _version_line(command: list[str], word: str) -> str | None:
    text = _output(command)
    return next((line.strip() for line in (text or "").splitlines() if word in line), None)


def build_tools(found: dict[str, Any]) -> list[Finding]:
    """Say whether native extensions (CPU Adam, asynchronous file access) can be built here; else why not (E11)."""
    missing = []
    if found["compiler"] is None:
        missing.append("no C++ compiler (g++) on PATH")
    if found["ninja"] is None:
        missing.append("no ninja on PATH (pip install ninja)")
    if found["cards"] and found["nvcc"] is None:
        where = f"CUDA_HOME is {found['cuda_home']}" if found["cuda_home"] else "CUDA_HOME is not set"
        missing.append(f"no nvcc: {where}, and none on PATH")
    if missing:
        return [
            Finding(
                "note",
                f"native extensions cannot be built: {'; '.join(missing)}",
                "Only offload to nvme needs them: the optimizer on the host falls back to PyTorch's own fused AdamW.",
            )
        ]
    files = "built" if found["async_io_built"] else "built by the first run that needs it"
    result = [
        Finding(
            "ok",
            f"native extensions can be built: {found['compiler']}, ninja {found['ninja']} (files on NVMe: {files})",
        )
    ]
    if not found["libaio"]:
        result.append(
            Finding(
                "note",
                "libaio.h is missing: no asynchronous file access for NVMe offload",
                "Install libaio-dev.",
            )
        )
    return result


def findings(found: dict[str, Any]) -> list[Finding]:
    """Return what a user should know about the machine, worst first."""
    result = build_tools(found)
    shared = found["shared_memory_bytes"]
    if shared is not None and shared < 2**30:
        result.append(
            Finding(
                "warning",
                f"/dev/shm holds {show_bytes(shared)}: NCCL and data loaders may fail",
                "In a container: --shm-size=8g, or --ipc=host.",
            )
        )
    if found["disk_free_bytes"] < 20e9:
        result.append(
            Finding(
                "warning",
                f"{show_bytes(found['disk_free_bytes'])} of disk left here",
                "Checkpoints need room.",
            )
        )
    if found["swap_bytes"] == 0 and found["host_bytes"] < 32e9 and found["cards"]:
        result.append(Finding("note", "little RAM and no swap: loading a large model may be killed"))
    result += sensor_findings(sensors())
    order = {"warning": 0, "note": 1, "ok": 2}
    return sorted(result, key=lambda f: order[f.level])


# ------------------------------------------------------------------------------------------------- power and heat

SENSORS = (
    "index",
    "name",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
HOT_CELSIUS = 84  # GeForce cards begin to throttle at 83 to 88

# Bits of clocks_throttle_reasons.active (NVML, nvmlClocksThrottleReasons).
POWER_CAP = 0x4
THROTTLES = {
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def sensors() -> list[dict[str, str]]:
    """Return one row per card, as nvidia-smi prints it; [] without cards."""
    text = _output(["nvidia-smi", f"--query-gpu={','.join(SENSORS)}", "--format=csv,noheader,nounits"])
    return [
        dict(zip(SENSORS, (c.strip() for c in line.split(",")), strict=False)) for line in (text or "").splitlines()
    ]


def throttles_of(row: dict[str, str]) -> list[str]:
    """Return what slows a card down just now."""
    try:
        active = int(row.get("clocks_throttle_reasons.active", "0"), 16)
    except ValueError:
        active = 0
    return [what for bit, what in THROTTLES.items() if active & bit]


def sensor_findings(rows: list[dict[str, str]]) -> list[Finding]:
    """Say which cards are hot, throttled, or in a narrow slot (E21, E02)."""
    result = []
    for row in rows:
        name = f"card {row.get('index')} ({row.get('name')})"
        heat = number_of(row.get("temperature.gpu"))
        if heat is not None and heat >= HOT_CELSIUS:
            result.append(
                Finding(
                    "warning",
                    f"{name} is at {heat:.0f} °C",
                    "Check fans; a lower power cap: nvidia-smi -pl WATTS.",
                )
            )
        if reasons := throttles_of(row):
            level = "note" if reasons == [THROTTLES[POWER_CAP]] else "warning"
            result.append(Finding(level, f"{name} is slowed down by: {', '.join(reasons)}"))
        width, most = number_of(row.get("pcie.link.width.current")), number_of(row.get("pcie.link.width.max"))
        if width is not None and most is not None and width < most:
            result.append(
                Finding(
                    "note",
                    f"{name} has {width:.0f} of its {most:.0f} PCIe lanes",
                    "Another slot, or the board shares lanes.",
                )
            )
    limits = [p for row in rows if (p := number_of(row.get("power.limit"))) is not None]
    if len(limits) > 1 and sum(limits) > 900:
        result.append(
            Finding(
                "note",
                f"{len(limits)} cards may draw {sum(limits):.0f} W together, for milliseconds twice that",
                "If the machine reboots under load, cap them: nvidia-smi -pl WATTS (four fifths cost little speed).",
            )
        )
    return result


def number_of(text: str | None) -> float | None:
    """Return a sensor's number; None for "[N/A]" and its like."""
    try:
        return float(text or "")
    except ValueError:
        return None
