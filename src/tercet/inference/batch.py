"""Texts that grow side by side: each joins and leaves when it likes (continuous batching), all share one forward a token.

A long prompt is computed in pieces, so that it holds the others up for one piece at a time, short ones together;
beginnings that prompts share are kept and copied. What a text becomes does not depend on its neighbours.
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
    scores: Tensor | None = None  # of the last choice, over the vocabulary: after the penalty, before the cuts

    @property
    def new(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    @property
    def logprobs(self) -> Tensor | None:
        return None if self.scores is None else self.scores.log_softmax(-1)

    @property
    def waits(self) -> bool:
        """Whether more of the prompt than its last token is still to be computed."""
        return not self.done and self.cached < len(self.prompt) - 1

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
        got = self._prompts(rows) if (rows := self._waiting()) else []
        going = [t for t in self.texts if not t.done and t.cached == len(t.ids) - 1 and t not in got]
        if self._own_cache:
            for text in going:
                self._own_forward(text, text.ids[text.cached :])
        elif going:
            self._tokens(going)
        return got + going

    def _waiting(self) -> range:
        """Return neighbouring rows whose prompts wait and are computed together: few tokens, and of about one length."""
        first = next((n for n, t in enumerate(self.texts) if t.waits), None)
        if first is None:
            return range(0)
        end, lengths = first, []
        while end < len(self.texts) and self.texts[end].waits:
            lengths.append(len(self.texts[end].prompt) - self.texts[end].cached)
            width = max(lengths)
            fits = all(t.cached + width <= self.capacity for t in self.texts[first : end + 1])
            if end > first and not (fits and width * len(lengths) <= PIECE_TOKENS and width <= 2 * min(lengths)):
                break
            end += 1
            if self._whole_prompts or self._own_cache:
                break
        return range(first, end)

    def _tokens(self, going: list[Running]) -> None:
        # Rows between them (ended, or in the middle of their prompt) are computed along; what is written for them is
        # what stands there already, or comes there next.
        places = [min(t.cached, len(t.ids) - 1) for t in self.texts]
        ids = [[t.ids[p]] for t, p in zip(self.texts, places, strict=True)]
        logits = self._forward(0, ids, places, [0] * len(ids))
        for n, text in enumerate(self.texts):
            if text in going:
                text.cached += 1
                self._choose(text, logits[n])

    def _prompts(self, rows: range) -> list[Running]:
        texts = [self.texts[n] for n in rows]
        if self._own_cache:
            self._own_forward(texts[0], texts[0].prompt)
            return texts
        most = len(texts[0].prompt) if self._whole_prompts else PIECE_TOKENS
        pieces = [list(t.prompt[t.cached :][:most]) for t in texts]
        width = max(map(len, pieces))
        # Shorter ones are filled up behind their end: nothing before it sees that, and what comes there overwrites it.
        ids = [piece + [0] * (width - len(piece)) for piece in pieces]
        logits = self._forward(rows.start, ids, [t.cached for t in texts], [len(piece) - 1 for piece in pieces])
        for row, text, piece, found in zip(rows, texts, pieces, logits, strict=True):
            text.cached += len(piece)
            if text.cached == len(text.prompt):
                if not self._whole_prompts:
                    self.prefixes.keep(text.prompt, self._slots, row)
                self._choose(text, found)
        return [t for t in texts if t.cached == len(t.prompt)]

    def _forward(self, row: int, ids: list[list[int]], begins: list[int], last: list[int]) -> Tensor:
        """Compute tokens of rows from `row` on, from their positions `begins` on; return logits of token `last` of each."""
        width = len(ids[0])
        positions = torch.tensor([list(range(b, b + width)) for b in begins], device=self.device)
        caches = self._slots.at(slice(row, row + len(ids)), positions)
        x, carried = self.model.begin(torch.tensor(ids, device=self.device), positions, caches=caches)
        for n in range(len(self.spec.layers)):
            x, _ = self.model.run_block(n, x, carried)
        if width > 1:  # the head is large: not for tokens that nothing is chosen from
            x = x[torch.arange(len(ids), device=self.device), torch.tensor(last, device=self.device)][:, None]
        return self.model.end(x, carried)[:, 0]

    def _own_forward(self, text: Running, fresh: Sequence[int]) -> None:
        positions = torch.arange(text.cached, text.cached + len(fresh), device=self.device)[None]
        logits = self.model(torch.tensor([list(fresh)], device=self.device), positions=positions, caches=text.own)
        text.cached += len(fresh)
        self._choose(text, logits[0, -1])

    def _choose(self, text: Running, logits: Tensor) -> None:
        row = logits[: self.vocabulary].float().cpu()
        token, text.scores = choose(row, text.ids, text.sampling, text.chance)
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
