"""Random numbers of a step: they follow from (seed, step, rank, micro-step), so there is nothing to save."""

from __future__ import annotations

import hashlib

import torch


def seed_random_numbers(seed: int, step: int, rank: int, micro_step: int) -> None:
    key = f"{seed}:{step}:{rank}:{micro_step}".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1)
