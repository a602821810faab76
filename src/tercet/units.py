"""Read and print bytes, counts, token lengths and seconds. A value's declared type decides how it is read."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)\s*$")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _split(text: str, what: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1].replace("_", "")), match[2]


def _whole(value: float, text: str, what: str) -> int:
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole {what}")
    return int(value)


def parse_count(text: str) -> int:
    """Read a count: 1000, 1_000, 1e3, 4k (4 000), 2M, 1.5B, 64Ki (65 536)."""
    value, suffix = _split(text, "a number")
    scale = _DECIMAL.get(suffix.lower()) or _BINARY.get(suffix.lower())
    if scale is None:
        raise ValueError(f"{text!r} has an unknown unit {suffix!r}; use k, M, B, T or Ki, Mi, Gi")
    return _whole(value * scale, text, "number")


def parse_token_length(text: str) -> int:
    """Read a sequence length. Here k is 1 024, as everyone means by a "4k context": 4k is 4 096."""
    value, suffix = _split(text, "a number of tokens")
    scale = {"": 1, "k": 2**10, "ki": 2**10, "m": 2**20, "mi": 2**20}.get(suffix.lower())
    if scale is None:
        raise ValueError(f"{text!r} has an unknown unit {suffix!r}; write tokens, or k for 1 024 of them")
    return _whole(value * scale, text, "number of tokens")


def parse_bytes(text: str) -> int:
    """Read a size: 24GB (decimal, 24 * 10**9), 24GiB (binary), 512MB, or plain bytes."""
    value, suffix = _split(text, "a size in bytes")
    unit = suffix.lower().removesuffix("b")
    scale = _DECIMAL.get(unit) or _BINARY.get(unit)
    if scale is None:
        raise ValueError(f"{text!r} has an unknown unit {suffix!r}; use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    return round(value * scale)


def show_bytes(value: float) -> str:
    """Print a size in binary units, as people mean "a 24 GB card": 21.4 GiB."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= scale:
            number = value / scale
            return f"{number:.1f} {unit}" if number < 100 else f"{number:.0f} {unit}"
    return f"{value:.0f} B"


def show_count(value: float) -> str:
    """Print a count short: 1.23 B, 850, 4.1 k."""
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def count_of(number: float, what: str) -> str:
    """Print a number of things: 1 step, 2 steps."""
    return f"{number:.15g} {what}" + ("" if number == 1 else "s")


def show_seconds(value: float) -> str:
    """Print a duration as one would say it: 12 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if 0 < value < 0.0995:
        return f"{1000 * value:.2g} ms"
    if value < 60:
        return f"{value:.1f} s"
    seconds = round(value)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{seconds} s"
