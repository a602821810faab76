"""The two ways to share n things among ranks, and how refusals name the sizes that would work."""

from __future__ import annotations


def chunk(n: int, ranks: int) -> tuple[int, ...]:
    """Return sizes by PyTorch's `Shard`: ceil(n / ranks) each, later ranks fewer or none (64 over 3: 22, 22, 20)."""
    size = -(-n // ranks)
    return tuple(max(0, min(n - r * size, size)) for r in range(ranks))


def balanced(n: int, ranks: int) -> tuple[int, ...]:
    """Return sizes that differ by at most one, larger ones first (64 over 3: 22, 21, 21)."""
    return tuple(n // ranks + (1 if r < n % ranks else 0) for r in range(ranks))


def divisors_near(n: int, wanted: int, count: int = 3) -> list[int]:
    """Return the divisors of n nearest to `wanted`, ascending."""
    valid = [d for d in range(1, n + 1) if n % d == 0]
    return sorted(sorted(valid, key=lambda d: (abs(d - wanted), d))[:count])


def either(sizes: list[int]) -> str:
    """Return "1, 2 or 4"."""
    words = [str(s) for s in sizes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
