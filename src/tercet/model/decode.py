"""Token by token: the loop with its cache, used by the engines' generate and by inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercet.model.cache import Growing

Forward = Callable[..., Tensor]  # the module, sharded or not: (input_ids, positions=, caches=) -> logits


@torch.no_grad()
def generate(
    forward: Forward,
    layers: int,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    vocabulary: int,
    device: torch.device | str = "cpu",
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    fixed_length: bool = False,
) -> list[int]:
    """Return up to `new_tokens` ids after `prompt`; temperature 0 takes the most probable one.

    Ids at or above `vocabulary` (the tokenizer's size) are never chosen, however large the embedding is.
    `fixed_length` keeps computing after a stop token: under sharding every rank must run the same number of
    forwards. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens")
    generator = torch.Generator().manual_seed(seed)
    caches = [Growing() for _ in range(layers)]
    ids, fresh, done = list(prompt), list(prompt), False
    result: list[int] = []
    for _ in range(new_tokens):
        begin = len(ids) - len(fresh)
        positions = torch.arange(begin, len(ids), device=device)[None]
        logits = forward(torch.tensor([fresh], device=device), positions=positions, caches=caches)
        chosen = _choose(logits[0, -1, :vocabulary].float().cpu(), temperature, top_p, generator)
        ids.append(chosen)
        fresh = [chosen]
        done = done or chosen in stop
        if done and not fixed_length:
            break
        if not done:
            result.append(chosen)
    return result


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        keep = ordered.cumsum(0) - ordered < top_p
        probabilities = torch.zeros_like(probabilities).index_put_((order[keep],), ordered[keep])
    return int(torch.multinomial(probabilities, 1, generator=generator))
