"""Memory that a rank may still take."""

from __future__ import annotations

import psutil
import torch

from tercet.spec.memory_limit import memory_limit


def free_bytes(device: torch.device, ranks: int) -> float:
    """Return the memory that a rank may still take: of its card, or its share of the host's."""
    if device.type == "cpu":
        free, limit = psutil.virtual_memory().available, memory_limit(ranks)
        if limit is not None:  # of all ranks together, which are about alike
            free = min(free, limit.bytes - ranks * psutil.Process().memory_info().rss)
        return max(0, free) / ranks
    return torch.get_device_module(device).mem_get_info(device)[0]
