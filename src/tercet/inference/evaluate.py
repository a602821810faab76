"""How well a model predicts texts: loss, perplexity, bits per byte; sums over tokens, so no batch size or rank shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tercet.data.loader import Batch, rows_once, weighted
from tercet.data.losses import complete
from tercet.data.shards import Rows
from tercet.data.tokenizer import Tokenizer, load
from tercet.inference.device import choose_device, on_device
from tercet.spec.objective import IGNORED
from tercet.weights.reading import DTYPES, load_model, model_place

Progress = Callable[[int], None]  # is told how many rows more are done
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Work:
    """What is computed: which model, in which type, where, on which rows, how many at once."""

    model: str
    rows: tuple[Rows, ...]
    pad_id: int
    batch: int = 8
    dtype: str | None = None
    device: str = "auto"

    @property
    def count(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Sums:
    """`nats`: the negated log-probability of all predicted tokens together. `bytes`: of the text that they stand for;
    None where the tokenizer does not tell. Where labels count by weights, nats and bytes do, and `weight` is their sum."""

    nats: float
    tokens: int
    weight: float
    bytes: float | None
    dtype: str
    device: str

    def __add__(self, other: Sums) -> Sums:
        both = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        counts = self.nats + other.nats, self.tokens + other.tokens, self.weight + other.weight
        return Sums(*counts, both, self.dtype, self.device)

    def figures(self) -> dict[str, Any]:
        """Return loss in nats a token, perplexity, bits per byte of text; None for what cannot be told."""
        loss = self.nats / self.weight if self.weight else None
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        return {
            "loss": loss,
            "perplexity": None if loss is None else math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": bits,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "device": self.device,
        }


@torch.no_grad()
def add_up(work: Work, rank: int = 0, ranks: int = 1, progress: Progress = lambda rows: None) -> Sums:
    """Return the sums over this rank's share of the rows; those of all ranks add up to the whole."""
    place = model_place(work.model)
    device = choose_device(work.device)
    if device.type == "cuda" and device.index is None:
        device = choose_device(f"cuda:{rank}")
    # On a CPU fp32 is both the exacter and, on most processors, the faster one.
    model = on_device(load_model(place, work.dtype or ("fp32" if device.type == "cpu" else None)), str(device))
    lengths = byte_lengths(load(place))
    nats, tokens, weight, size = 0.0, 0, 0.0, 0.0
    for rows in work.rows:
        for batch in rows_once(rows, work.pad_id, weighted(rows), rank=rank, ranks=ranks, micro_batch=work.batch):
            if count := batch.trained_tokens:
                nats += _loss(model, batch, device)
                tokens, weight = tokens + count, weight + batch.trained_weight
            if lengths is not None:
                size += _bytes(batch, lengths)
            progress(sum(number >= 0 for number in batch.rows))
    dtype = next(word for word, kind in DTYPES.items() if kind == next(model.parameters()).dtype)
    return Sums(nats, tokens, weight, None if lengths is None else size, dtype, device.type)


def _loss(model: torch.nn.Module, batch: Batch, device: torch.device) -> float:
    trained, here = batch.trained_tokens, batch.to(device)
    found = model(
        here.input_ids,
        positions=here.positions,
        documents=here.documents,
        labels=here.labels,
        trained=trained,
        weights=here.weights,
    )
    return found.item()


def _bytes(batch: Batch, lengths: np.ndarray) -> float:
    counts = batch.labels != IGNORED
    found = lengths[batch.labels[counts].numpy()]
    return float(found.sum() if batch.weights is None else (found * batch.weights[counts].double().numpy()).sum())


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return how many bytes of UTF-8 each id stands for, control tokens none; None when the tokenizer does not tell.

    With them models whose tokenizers differ are compared on the same text.
    """
    if not complete(tokenizer):
        return None
    backend = tokenizer.backend
    state = json.loads(backend.to_str())
    byte_level = '"ByteLevel"' in json.dumps([state["pre_tokenizer"], state["normalizer"]])
    added = {token["id"]: token for token in state.get("added_tokens") or ()}
    table = np.zeros(tokenizer.size, np.int64)
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        if i in added:
            table[i] = 0 if added[i]["special"] else len(token.encode())
        elif byte_level:
            table[i] = len(token)  # one character a byte
        else:
            table[i] = 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
    for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id):
        if i is not None:
            table[i] = 0
    return table


def name_of(model: str) -> str:
    """Return what a table calls a model: the end of its path."""
    return Path(model).name or model


def total(parts: Sequence[Sums]) -> Sums:
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found
