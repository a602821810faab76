"""Make the simulated cards of this process: PyTorch then knows the device "card"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import _device_constructors

from tercet.errors import TercetError
from tercet.rehearsal import module, transfers  # noqa: F401 - transfers registers its operators
from tercet.rehearsal.attention import scaled_dot_product_attention
from tercet.rehearsal.card import META, NAME, _Installed, on_card, simulation
from tercet.rehearsal.device import Simulation

_library: torch.library.Library | None = None


def _register() -> None:
    """Tell PyTorch of the device; once per process, for good."""
    global _library
    if _library is not None:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError:
        raise TercetError("simulated cards need torch 2.13 or newer", f"This is torch {torch.__version__}.") from None
    _setup_privateuseone_for_python_backend(NAME, backend_module=sys.modules[module.__name__])
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    # PyTorch asks no Python backend which attention kernel it has.
    _library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")


def _place(dtype: torch.dtype | None) -> Any:
    floating = (dtype or torch.get_default_dtype()).is_floating_point
    return META if simulation().shapes and floating else "cpu"


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    raw = torch.empty(size, dtype=dtype, device=_place(dtype), memory_format=memory_format or torch.contiguous_format)
    return on_card(module._device(device), raw)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return on_card(module._device(device), torch.empty_strided(size, stride, dtype=dtype, device=_place(dtype)))


@contextmanager
def cards(simulated: Simulation) -> Iterator[Simulation]:
    """Within this, torch.device("card", n) is one of the simulation's cards."""
    _register()
    _device_constructors()  # `with torch.device(…)` remembers the factory functions at its first use: not the one below
    before, _Installed.simulation = _Installed.simulation, simulated
    pin, is_pinned, empty = torch.Tensor.pin_memory, torch.Tensor.is_pinned, torch.empty

    def pinned_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if pin_memory:
            simulated.pin(made)
        return made

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        copy = tensor.clone()
        simulated.pin(copy)
        return copy

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda tensor, device=None: simulated.is_pinned(tensor)  # type: ignore[method-assign]
    torch.empty = pinned_empty  # type: ignore[assignment]
    try:
        yield simulated
    finally:
        torch.Tensor.pin_memory, torch.Tensor.is_pinned, torch.empty = pin, is_pinned, empty  # type: ignore[method-assign]
        _Installed.simulation = before
