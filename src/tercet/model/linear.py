"""Linear and embedding layers without an initialisation of their own.

Values come from one place (decoder.initial_tensor) or from files. PyTorch's own would cost seconds: on the meta device
the embedding's loads a symbolic algebra system first.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""
