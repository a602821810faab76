"""Small models, batches and strategies for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tercet.engine import EngineSetup, open_engine
from tercet.engine.native import NativeEngine
from tercet.spec.families import describe
from tercet.spec.model import Model
from tercet.spec.recipe import WORDS, ModelSection, OptimSection, StrategySection
from tercet.spec.strategy import Strategy, Work, resolve

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def tiny_model(**sizes: Any) -> Model:
    """Sizes that three does not divide: 2 layers, width 32, vocabulary 67, ffn 44."""
    return describe(
        ModelSection(
            **{
                "layers": 2,
                "width": 32,
                "heads": 4,
                "kv_heads": 2,
                "ffn": 44,
                "vocabulary": 67,
                "context_tokens": 64,
                **sizes,
            }
        )
    )


def tiny_strategy(word: str, ranks: int, batch: int, micro_batch: int = 1, tokens: int = 16, **keys: Any) -> Strategy:
    section = StrategySection.model_validate({**WORDS[word], "micro_batch": micro_batch, **keys})
    return resolve(section, ranks, Work(tokens, batch))


@dataclass
class TinyBatch:
    """As data/loader.py's Batch, made by hand so that these tests do not stand on the data room."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    rows: list[int]
    weights: torch.Tensor | None = None
    sources: list[int] | None = None

    @property
    def trained_tokens(self) -> int:
        return int((self.labels != -100).sum())

    @property
    def trained_weight(self) -> float:
        kept = self.labels != -100
        return float(kept.sum() if self.weights is None else self.weights[kept].double().sum())

    def to(self, device: object) -> TinyBatch:
        return self


def global_batch(step: int, rows: int, tokens: int = 16, vocabulary: int = 67) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids, shifted labels); rows train 1, 2, 3, … tokens only, the last row all of them."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], 1)
    for row in range(rows - 1):
        labels[row, row + 1 :] = -100
    return ids, labels


def micro_batches(
    step: int, rank: int, ranks: int, micro: int, rows: int, tokens: int = 16, vocabulary: int = 67
) -> list[TinyBatch]:
    """Deal the global batch by the contract: place (a, rank, j) holds row (a * ranks + rank) * micro + j."""
    ids, labels = global_batch(step, rows, tokens, vocabulary)
    found = []
    for a in range(-(-rows // (ranks * micro))):
        picked = [(a * ranks + rank) * micro + j for j in range(micro)]
        i = torch.stack([ids[p] if p < rows else torch.zeros_like(ids[0]) for p in picked])
        y = torch.stack([labels[p] if p < rows else torch.full_like(labels[0], -100) for p in picked])
        borders = torch.tensor(
            [e for r in range(micro) for e in (r * tokens, r * tokens + tokens // 2)] + [micro * tokens]
        )
        positions = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)]).repeat(micro, 1)
        # No document border inside a row may be trained across: the border's label is dropped in every layout alike.
        y[:, tokens // 2 - 1] = -100
        found.append(TinyBatch(i, y, positions, borders.int(), [p if p < rows else -1 for p in picked]))
    return found


def tiny_engine(
    world: Any,
    strategy: Strategy,
    precision: str = "fp32",
    model: Model | None = None,
    sources: int = 1,
    **optim: Any,
) -> NativeEngine:
    # A large eps lets the update follow the gradient smoothly: AdamW's first steps are a sign function otherwise,
    # and rounding of a gradient near zero would show as a full step.
    section = OptimSection(**{"lr": 1e-2, "clip": 0.5, "eps": 1e-3, **optim})
    engine = open_engine(
        EngineSetup(model or tiny_model(), strategy, section, precision, world, seed=7, sources=sources)
    )
    assert isinstance(engine, NativeEngine)
    return engine


def whole_weights(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}
