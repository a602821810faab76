"""Where a model computes: a card where there is one and the model fits, else the CPU."""

from __future__ import annotations

import torch
from torch import nn

from tercet.errors import InputError
from tercet.units import show_bytes


def choose_device(wanted: str) -> torch.device:
    """Return the device of a word: auto, cpu, cuda, cuda:1. Raises InputError for another one, or a card that is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= cards:
        raise InputError(f"device is {wanted!r}, and PyTorch finds {cards} cards here", "Take --device cpu.")
    return device


def on_device(model: nn.Module, wanted: str = "auto") -> nn.Module:
    """Return the model on a device. Raises InputError with both sizes when it does not fit."""
    device = choose_device(wanted)
    if device.type == "cpu":
        return model
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        need = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        have = torch.cuda.get_device_properties(device).total_memory
        raise InputError(
            f"the model's weights are {show_bytes(need)}; {device} has {show_bytes(have)} in all, or is in use",
            "Take --device cpu, or --quantize int8.",
        ) from None
