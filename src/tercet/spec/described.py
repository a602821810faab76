"""A host in a user's words: processor, memory channels and drive, as "7950X 2xDDR5-5600 nvme=7GB/s".

What follows from it are estimates of rates that `tercet doctor` measures; Machine.known prefers measured ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tercet.errors import InputError

EXAMPLE = 'For example: --host "7950X 2xDDR5-5600" or "EPYC 9354 12xDDR5-4800 nvme=7GB/s"'
MEMORY = re.compile(r"(\d{1,2})\s*[x×]\s*(?:\d+GB-)?DDR([345])-(\d{3,5})", re.IGNORECASE)
DRIVE = re.compile(r"nvme\s*[=:]?\s*(\d+(?:\.\d+)?)\s*GB/s", re.IGNORECASE)
# Ryzen and Core processors for desktops have two channels, however many sticks are in; Threadripper's numbers are others.
DESKTOP = re.compile(r"\b[3-9][3-9][05]0(?:X|X3D|G|F|GE|XT)?\b|\bi[3579]-\d{4,5}\w*|\bultra [579]\b", re.IGNORECASE)

BYTES_PER_TRANSFER = 8  # of one channel (DDR5 halves it into two of four bytes)
ADAM_BYTES = 28  # per parameter in fp32: weight, gradient and two moments are read, all but the gradient written
# Of the channels' peak. ZeRO-Offload (arXiv 2101.06840, table 4): 10 B parameters in 2.57 s on two sockets of six
# channels DDR4-2666, which is 109 of 256 GB/s; smaller models to 0.51.
ADAM_SHARE = 0.43
MEMORY_SHARE = 0.75  # what copies reach of the peak (an assumption)
PASSES = 4  # through the host's memory that a staged collective makes for each byte it is quoted for


@dataclass(frozen=True)
class Host:
    """`name` is shown, and decides how many channels there can be; rates are in bytes per second."""

    name: str
    channels: int
    bandwidth: float
    drive: float | None

    def rates(self) -> dict[str, float]:
        """Return what it is expected to reach, under the names of Machine.known."""
        found = {
            "cpu_adam": self.bandwidth * ADAM_SHARE / ADAM_BYTES,
            "staged_total": self.bandwidth * MEMORY_SHARE / PASSES,
        }
        return found if self.drive is None else {**found, "disk_write": self.drive}

    def describe(self) -> str:
        rates = self.rates()
        drive = "" if self.drive is None else f", NVMe {self.drive / 1e9:g} GB/s"
        return (
            f"{self.name or 'host'}: {self.channels} memory channels, {self.bandwidth / 1e9:.0f} GB/s at most, AdamW of "
            f"{rates['cpu_adam'] / 1e9:.1f} G parameters/s expected (tercet doctor measures it){drive}"
        )


def parse_host(text: str) -> Host:
    """Read --host. Raises InputError when it names no memory channels."""
    memory = MEMORY.search(text)
    if memory is None:
        raise InputError(f"--host {text!r} names no memory channels", EXAMPLE)
    drive = DRIVE.search(text)
    rest = DRIVE.sub("", MEMORY.sub("", text))
    name = " ".join(rest.replace(",", " ").split())
    channels, transfers = int(memory[1]), int(memory[3]) * 1e6
    if not 1 <= channels <= 24 or not 400e6 <= transfers <= 12_800e6:
        raise InputError(f"--host {text!r}: {memory[0]} is no memory that is made", EXAMPLE)
    if DESKTOP.search(name):
        channels = min(channels, 2)
    return Host(name, channels, channels * BYTES_PER_TRANSFER * transfers, float(drive[1]) * 1e9 if drive else None)


def parse_watts(text: str) -> float:
    """Read "300W" or "300". Raises InputError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*w?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--power-limit {text!r} is no power", "For example: --power-limit 300W")
    return float(match[1])
