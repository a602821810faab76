"""Linear and embedding layers without an initialisation of their own.

Values come from one place (decoder.initial_tensor) or from files. PyTorch's own would cost seconds: on the meta device
the embedding's loads a symbolic algebra system first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""


def weight_of(linear: Any) -> Tensor:
    """Return the matrix that a linear layer multiplies with: unpacked, and with its adapter's product added."""
    if (base := getattr(linear, "base_layer", None)) is not None:
        whole = weight_of(base)
        for name in linear.active_adapters:
            whole = whole + linear.get_delta_weight(name).to(whole.dtype)
        return whole
    unpacked = getattr(linear, "unpacked", None)  # quantized.py
    return linear.weight if unpacked is None else unpacked()
