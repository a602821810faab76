"""A module on the meta device is given its values, piece by piece."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def fill_parameters(piece: torch.nn.Module, prefix: str, value_of: Callable[[str], Tensor]) -> None:
    """Give every parameter of `piece` that is still on meta its value, which `value_of` finds by the whole name.

    A parameter that stands in several places (a tied head) stays one.
    """
    places: dict[Tensor, list[str]] = {}
    for name, parameter in piece.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            places.setdefault(parameter, []).append(name)
    for parameter, names in places.items():
        value = torch.nn.Parameter(value_of(prefix + names[0]), requires_grad=parameter.requires_grad)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(piece.get_submodule(owner), attribute, value)


def make_buffers(model: torch.nn.Module, device: torch.device | str = "cpu") -> None:
    """Give every buffer that is still on meta its start, zeros, and bring the others to the device."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
