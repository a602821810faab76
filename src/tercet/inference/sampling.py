"""The choice of the next token. Order of the steps as in transformers: penalty, temperature, top-k, top-p, min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-5  # below it the most probable token is all there is, and fp32 has no room for the quotient


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the most probable token. top_k 0, top_p 1, min_p 0 and penalty 1 change nothing.

    repetition_penalty: logits of tokens in the text so far are divided by it where positive, else multiplied
    (Keskar et al. 2019, arXiv 1909.05858). min_p: least probability, as a share of the highest (arXiv 2407.01082).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = 0  # None: another one each time

    def generator(self) -> torch.Generator:
        """Return the text's own source of chance: what runs beside it does not change it."""
        made = torch.Generator()
        if self.seed is None:
            made.seed()
        else:
            made.manual_seed(self.seed)
        return made


def choose(logits: Tensor, text: Sequence[int], how: Sampling, generator: torch.Generator) -> tuple[int, Tensor]:
    """Return (token, the logits after the penalty and before the cuts) of logits (vocabulary,) in fp32."""
    scores = penalised(logits, text, how.repetition_penalty)
    if how.temperature < COLDEST:
        return int(scores.argmax()), scores
    return int(torch.multinomial(probabilities(scores, how), 1, generator=generator)), scores


def penalised(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    if penalty == 1.0 or not text:
        return logits
    seen = torch.tensor(sorted({i for i in text if i < len(logits)}), dtype=torch.long)
    values = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """Return what each token's chance is in proportion to, after the cuts; temperature is above 0."""
    logits = (logits - logits.max()) / how.temperature
    if 0 < how.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[-1], -torch.inf)
    chances = logits.softmax(-1)
    if how.top_p < 1.0:
        ordered, order = chances.sort(descending=True)
        dropped = order[ordered.cumsum(0) - ordered >= max(how.top_p, 1e-9)]
        chances = chances.index_fill(0, dropped, 0.0)
    if how.min_p > 0.0:
        chances = chances.masked_fill(chances < how.min_p * chances.max(), 0.0)
    return chances
