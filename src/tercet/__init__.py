"""Tercet: train DeepSeek-style language models on a few graphics cards, predicted before it runs.

The public names are functions and load nothing heavy until they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "plan", "train"]

if TYPE_CHECKING:
    from pathlib import Path

    from tercet.model.decoder import Decoder
    from tercet.model.through_transformers import ThroughTransformers


def load_model(folder: str | Path, dtype: str | None = None) -> Decoder | ThroughTransformers:
    """Return the model of a Hugging Face folder (or of a run folder: its trained model) in evaluation mode.

    `model(input_ids)` takes integers of shape (batch, tokens) and gives logits of shape
    (batch, tokens, vocabulary). `dtype` ("fp32", "bf16", "fp16", "fp64") defaults to the one stored.
    Raises InputError when the folder is incomplete or its architecture is unknown.
    """
    from tercet.weights.reading import load_model as load

    return load(folder, dtype=dtype)


def plan(recipe: str | Path, *overrides: str, **machine: Any) -> dict[str, Any]:
    """Return what `tercet plan RECIPE key=value … --json` prints. Loads no torch."""
    from tercet.planner.answer import plan as answer

    return answer(recipe, list(overrides), **machine)


def train(recipe: str | Path, *overrides: str, ranks: int | None = None, output: str | None = None) -> Path:
    """Train as `tercet train RECIPE key=value …` does and return the run folder."""
    from tercet.training.needs import require_unix

    require_unix()
    from tercet.training.supervise import train as run

    return run(recipe, list(overrides), ranks=ranks, output=output)
