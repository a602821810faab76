"""Texts that grow side by side: each joins and leaves when it likes (continuous batching), all share one forward a token.

A prompt is computed alone, in pieces, so that long ones hold the others up for one piece at a time; beginnings that
prompts share are kept and copied. What a text becomes does not depend on its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tercet.inference.sampling import Sampling, choose
from tercet.model.cache import Growing, Slots
from tercet.model.decoder import Decoder

PIECE_TOKENS = 256
LEAST_PREFIX_TOKENS = 16  # shorter common beginnings are computed again: copying costs as much


@dataclass(eq=False)
class Running:
    """One text. `ids` are prompt and answer; `new` the answer's tokens; `ended`: a stop token came (it is not in `new`)."""

    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling
    stop: frozenset[int]
    ids: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are kept
    reused: int = 0  # of them, tokens that another prompt had brought
    ended: bool = False
    chance: torch.Generator = field(default_factory=torch.Generator)
    own: list[Any] | None = None  # caches of a module that knows no slots
    logprobs: Tensor | None = None  # of the last choice, over the vocabulary

    @property
    def new(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return self.ended or len(self.ids) - len(self.prompt) >= self.limit


class Batch:
    """Up to `rows` texts of up to `capacity` tokens each. `vocabulary`: ids from it on are never chosen."""

    def __init__(self, model: Any, rows: int = 8, capacity: int | None = None, vocabulary: int | None = None):
        self.model, self.spec = model.eval(), model.spec
        self.capacity = capacity or self.spec.context_tokens
        self.vocabulary = min(vocabulary or self.spec.vocabulary, self.spec.vocabulary)
        self.rows, self.texts = rows, []  # text n lies in row n
        self._own_cache = not isinstance(model, Decoder)
        self._slots = Slots(len(self.spec.layers), rows, self.capacity)
        self._whole_prompts = self.spec.rope.kind == "dynamic"  # its angles depend on how much is computed at once
        self.prefixes = Prefixes()
        self.device = next(model.parameters()).device
        self.texts: list[Running]

    @property
    def has_room(self) -> bool:
        return len(self.texts) < self.rows

    def add(self, prompt: Sequence[int], limit: int, sampling: Sampling, stop: Sequence[int] = ()) -> Running:
        """Take a text in. Raises ValueError for an empty prompt, or one that leaves no room for a token."""
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) >= self.capacity:
            raise ValueError(f"the prompt has {len(prompt)} tokens; {self.capacity} are the most, answer included")
        if not self.has_room:
            raise ValueError(f"all {self.rows} rows are taken")
        text = Running(tuple(prompt), min(limit, self.capacity - len(prompt)), sampling, frozenset(stop), list(prompt))
        text.chance = sampling.generator()
        if self._own_cache:
            text.own = [Growing() for _ in self.spec.layers]
        elif not self._whole_prompts and (found := self.prefixes.longest(text.prompt)):
            text.cached = text.reused = found[0]
            self._slots.put(len(self.texts), *found)
        self.texts.append(text)
        return text

    def remove(self, text: Running) -> None:
        """Let a text go; the last row takes its place, so that rows in use stay side by side."""
        row, last = self.texts.index(text), len(self.texts) - 1
        if row != last and not self._own_cache:
            self._slots.move(last, row, self.texts[last].cached)
        self.texts[row] = self.texts[last]
        self.texts.pop()

    @torch.no_grad()
    def step(self) -> list[Running]:
        """Compute one piece of a prompt, if one waits, and one token of every other text. Return the texts that got a token."""
        got = []
        waiting = next((t for t in self.texts if not t.done and t.cached < len(t.prompt) - 1), None)
        if waiting is not None:
            got += self._prompt(waiting)
        going = [t for t in self.texts if not t.done and t.cached == len(t.ids) - 1 and t not in got]
        if self._own_cache:
            for text in going:
                self._choose(text, self._forward(text, text.ids[text.cached :]))
        elif going:
            self._tokens(going)
        return got + going

    def _tokens(self, going: list[Running]) -> None:
        # Rows between them (ended, or in the middle of their prompt) are computed along; what is written for them is
        # what stands there already, or comes there next.
        places = [min(t.cached, len(t.ids) - 1) for t in self.texts]
        positions = torch.tensor(places, device=self.device)[:, None]
        ids = torch.tensor([t.ids[p] for t, p in zip(self.texts, places, strict=True)], device=self.device)[:, None]
        logits = self.model(ids, positions=positions, caches=self._slots.at(slice(0, len(places)), positions))
        for n, text in enumerate(self.texts):
            if text in going:
                text.cached += 1
                self._choose(text, logits[n, -1])

    def _prompt(self, text: Running) -> list[Running]:
        fresh = text.prompt[text.cached :]
        if not self._own_cache and not self._whole_prompts:
            fresh = fresh[:PIECE_TOKENS]
        logits = self._forward(text, fresh)
        if text.cached < len(text.prompt):
            return []
        if not self._own_cache and not self._whole_prompts:
            self.prefixes.keep(text.prompt, self._slots, self.texts.index(text))
        self._choose(text, logits)
        return [text]

    def _forward(self, text: Running, fresh: Sequence[int]) -> Tensor:
        """Compute tokens that follow the cached ones; return the last one's logits."""
        positions = torch.arange(text.cached, text.cached + len(fresh), device=self.device)[None]
        row = self.texts.index(text)
        caches = text.own if text.own is not None else self._slots.at(slice(row, row + 1), positions)
        logits = self.model(torch.tensor([list(fresh)], device=self.device), positions=positions, caches=caches)
        text.cached += len(fresh)
        return logits[0, -1]

    def _choose(self, text: Running, logits: Tensor) -> None:
        row = logits[: self.vocabulary].float().cpu()
        token, text.logprobs = choose(row, text.ids, text.sampling, text.chance)
        if token in text.stop:
            text.ended = True
        else:
            text.ids.append(token)


class Prefixes:
    """Keys and values of the prompts seen last, for prompts that begin alike (a shared system prompt, a chat that goes on)."""

    def __init__(self, most: int = 8, most_bytes: int = 2**29):
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[int, ...], list[dict[str, Tensor]]] = OrderedDict()

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, list[dict[str, Tensor]]] | None:
        """Return (tokens in common, what is kept of them); the prompt's last token is always left to be computed."""
        best, best_key = 0, None
        for key in self._kept:
            pairs = zip(key, prompt[:-1], strict=False)
            common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(key), len(prompt) - 1))
            if common > best:
                best, best_key = common, key
        if best_key is None or best < LEAST_PREFIX_TOKENS:
            return None
        self._kept.move_to_end(best_key)
        return best, self._kept[best_key]

    def keep(self, prompt: tuple[int, ...], slots: Slots, row: int) -> None:
        if len(prompt) < LEAST_PREFIX_TOKENS or prompt in self._kept:
            return
        for key in [k for k in self._kept if prompt[: len(k)] == k]:  # a chat that went on holds its beginning
            del self._kept[key]
        self._kept[prompt] = slots.copy(row, len(prompt))
        while len(self._kept) > self._most or (len(self._kept) > 1 and self.nbytes > self._most_bytes):
            self._kept.popitem(last=False)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for copied in self._kept.values() for layer in copied for t in layer.values())


def run(
    batch: Batch, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, stop: Sequence[int]
) -> list[Running]:
    """Return the finished text of every prompt, as many at a time as there are rows."""
    texts: list[Running | None] = [None] * len(prompts)
    waiting: Iterator[tuple[int, Sequence[int]]] = iter(enumerate(prompts))
    left = len(prompts)
    while left:
        while batch.has_room and (following := next(waiting, None)) is not None:
            texts[following[0]] = batch.add(following[1], limit, sampling, stop)
        batch.step()
        for text in [t for t in batch.texts if t.done]:
            batch.remove(text)
            left -= 1
    return [t for t in texts if t is not None]
