"""The order in which rows are trained: a pure function of the seed and the sample's number, and of nothing
else.

A resumed run, or one on another number of ranks, therefore needs to know one integer. Random numbers come
from SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), written out here
because the streams of numpy's generators may change between versions.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 output for each state `x` (uint64), any shape."""
    with np.errstate(over="ignore"):
        z = x + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key(*parts: int) -> np.uint64:
    """Return one 64-bit number that depends on every part and on their order."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = splitmix64(state ^ np.array([part % 2**64], np.uint64))
    return state[0]


def permutation(count: int, *parts: int) -> np.ndarray:
    """Return a permutation of range(count), int64, that depends on `parts` (seed, source, epoch, …)."""
    with np.errstate(over="ignore"):
        states = key(*parts) + np.arange(count, dtype=np.uint64) * _GOLDEN
    # Stable, so that equal hashes keep their order and every version of numpy gives the same answer.
    order = np.argsort(splitmix64(states), kind="stable")
    order.setflags(write=False)
    return order


def apportion(weights: tuple[Fraction, ...], samples: int) -> list[int]:
    """Return how many of the first `samples` samples belong to each source.

    The method is Webster's (divisors 1, 3, 5, …): the sums are exact, each share is within one sample or so
    of its quota, and no count ever falls when `samples` grows, so "the n-th sample" has one owner.
    `weights` sum to 1.
    """
    counts = [int(w * samples + Fraction(1, 2)) for w in weights]
    while (short := samples - sum(counts)) > 0:
        k = min(range(len(weights)), key=lambda k: ((2 * counts[k] + 1) / weights[k], k))
        counts[k] += 1
    while short < 0:
        k = max((k for k in range(len(weights)) if counts[k]), key=lambda k: ((2 * counts[k] - 1) / weights[k], k))
        counts[k] -= 1
        short += 1
    return counts


def owner(weights: tuple[Fraction, ...], sample: int) -> tuple[int, int]:
    """Return (source, how many samples that source gave before) for sample number `sample`, from 0."""
    before, after = apportion(weights, sample), apportion(weights, sample + 1)
    k = next(k for k in range(len(weights)) if after[k] > before[k])
    return k, before[k]
