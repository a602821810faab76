"""The decoder: embeddings, layers, head. Module names are transformers' names, so tensors need no renaming."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tercet.model.adapter import adapter_start
from tercet.model.attention import Documents
from tercet.model.balance import Tally
from tercet.model.cache import Cache
from tercet.model.gqa import Attention
from tercet.model.linear import Embedding, Linear, multiply
from tercet.model.mla import LatentAttention
from tercet.model.moe import MixtureOfExperts
from tercet.model.mtp import PredictionLayer, further
from tercet.model.norm import RMSNorm
from tercet.model.objective import RowLosses, next_token_loss
from tercet.model.rope import Table, rotary_table
from tercet.model.swiglu import FeedForward
from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.mla import MLA
from tercet.spec.blocks.moe import MoE
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.model import AttentionBlock, FeedForwardBlock, Layer, Model


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); x is (batch, tokens, width).

    Returns x, or with a tally (x, balance loss or None).
    """

    def __init__(self, layer: Layer, model: Model):
        super().__init__()
        self.self_attn = attention_of(layer.attention, model)
        self.mlp = feedforward_of(layer.feedforward, model.width)
        self.input_layernorm = RMSNorm(model.width, model.norm_eps)
        self.post_attention_layernorm = RMSNorm(model.width, model.norm_eps)

    def forward(
        self,
        x: Tensor,
        table: Table,
        documents: Documents | None = None,
        cache: Cache | None = None,
        tally: Tally | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        x, loss = run_layer(self, x, table, documents, cache, tally)
        return x if tally is None else (x, loss)


def run_layer(
    layer: Any, x: Tensor, table: Table, documents: Documents | None, cache: Cache | None, tally: Tally | None
) -> tuple[Tensor, Tensor | None]:
    """Return (x, balance loss) of anything that has a decoder layer's four parts."""
    x = x + layer.self_attn(layer.input_layernorm(x), table, documents, cache)
    normed = layer.post_attention_layernorm(x)
    if isinstance(layer.mlp, FeedForward):
        return x + layer.mlp(normed), None
    out, loss = layer.mlp(normed, tally)
    return x + out, loss


def attention_of(spec: AttentionBlock, model: Model) -> Attention | LatentAttention:
    """Return the module of a description; the same for `feedforward_of`."""
    if isinstance(spec, MLA):
        return LatentAttention(spec, model)
    assert isinstance(spec, GQA)
    return Attention(spec, model)


def feedforward_of(spec: FeedForwardBlock, width: int) -> FeedForward | MixtureOfExperts:
    if isinstance(spec, MoE):
        return MixtureOfExperts(spec, width)
    assert isinstance(spec, SwiGLU)
    return FeedForward(spec, width)


class Body(nn.Module):
    """Everything below the head. Layers are keyed by number, so a part of them keeps its names.

    Further predictions follow the layers in numbering, as in the published files.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.embed_tokens = Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleDict({str(n): DecoderLayer(layer, model) for n, layer in enumerate(model.layers)})
        for k, block in enumerate(model.mtp):
            own = PredictionLayer(block, model, DecoderLayer(block.layer, model))
            self.layers[str(len(model.layers) + k)] = own
        self.norm = RMSNorm(model.width, model.norm_eps)


@dataclass(frozen=True)
class Carried:
    """What the blocks and the end of one micro-batch need besides x: made by `Decoder.begin`, then read only."""

    input_ids: Tensor
    labels: Tensor | None
    weights: Tensor | None  # of the labels in the loss; None: 1 each
    trained: int | None
    documents: Tensor | None  # on the device
    borders: Documents | None
    table: Table
    tally: Tally | None
    caches: Sequence[Cache] | None
    training: bool
    rows: RowLosses | None = None  # told the main loss of each row


class Decoder(nn.Module):
    """A language model of `spec` (tercet.spec.model.Model); build under torch.device("meta") to allocate later.

    A call is `begin`, every block, `end`; whoever orders the work otherwise (all micro-batches through one block
    before the next) calls these itself.

    `mtp_weight` and `balance` say how much the terms besides the main loss count while training; whoever trains
    sets them, step by step when a schedule asks for it.
    """

    def __init__(self, spec: Model):
        super().__init__()
        self.spec = spec
        self.balance = spec.balance
        self.mtp_weight = 0.3 if spec.mtp else 0.0
        self.model = Body(spec)
        self.lm_head = None if spec.tied else Linear(spec.width, spec.vocabulary, bias=False)

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (prefix of its names, layer) in order, further predictions included."""
        for name, layer in self.model.layers.items():
            yield f"model.layers.{name}.", layer

    def join(self) -> None:
        """Compute products with the same x as one, for generating. The model must not move to a device any more."""
        for part in self.modules():
            if isinstance(part, Attention | FeedForward):
                part.join()

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        trained: int | None = None,
        weights: Tensor | None = None,
        rows: RowLosses | None = None,
    ) -> Tensor:
        """Return logits (batch, tokens, vocabulary), or with `labels` the summed loss, a scalar.

        input_ids, positions, labels: (batch, tokens) integers. documents: (documents + 1,) borders over the
        batch * tokens flattened tokens; without them each row is one document. labels are already shifted;
        weights, (batch, tokens) too, say by how much each counts in the loss.
        `rows` is told the main loss of each row. Borders on the host and `trained`, the number of labels that count, spare waiting for a card.

        The loss's value is the main loss alone. While training, its gradient is that of the main loss plus the
        balance and multi-token prediction terms: what is printed stays comparable, what is learned is the sum.
        """
        x, carried = self.begin(input_ids, positions, documents, labels, caches, trained, weights, rows)
        balance: list[Tensor] = []
        for n in range(len(self.spec.layers)):
            x, loss = self.run_block(n, x, carried)
            balance += [] if loss is None else [loss]
        return self.end(x, carried, balance)

    def begin(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        trained: int | None = None,
        weights: Tensor | None = None,
        rows: RowLosses | None = None,
    ) -> tuple[Tensor, Carried]:
        """Return (what goes into the first block, what every block needs besides); arguments as in `forward`."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        borders = None if documents is None else Documents.of(documents, input_ids.device)
        training = self.training and labels is not None and torch.is_grad_enabled()
        edges = None if borders is None else borders.boundaries
        tally = (
            Tally.of(labels, edges, self.balance, weights)
            if labels is not None and training and self.has_experts
            else None
        )
        x = self.model.embed_tokens(input_ids)
        attention = self.spec.layers[0].attention
        wide = torch.float32 if getattr(attention, "fp32_rotation", False) else x.dtype
        table = rotary_table(self.spec.rope, attention.rotary_dim, positions, wide)
        return x, Carried(input_ids, labels, weights, trained, edges, borders, table, tally, caches, training, rows)

    def run_block(self, n: int, x: Tensor, carried: Carried) -> tuple[Tensor, Tensor | None]:
        """Return layer n's (x, balance loss or None)."""
        cache = None if carried.caches is None else carried.caches[n]
        found = self.model.layers[str(n)](x, carried.table, carried.borders, cache, carried.tally)
        return found if carried.tally is not None else (found, None)

    def end(self, x: Tensor, carried: Carried, balance: Sequence[Tensor] = ()) -> Tensor:
        """Return what `forward` does, from the last layer's x; the blocks' balance losses join the gradient."""
        x = self.model.norm(x)
        if carried.labels is None:
            return multiply(x, self.head_weight)
        main = next_token_loss(x, self.head_weight, carried.labels, carried.trained, carried.weights, carried.rows)
        predicts = carried.training and self.spec.mtp and self.mtp_weight > 0
        further_losses = self._further_losses(x, carried) if predicts else []
        for term in (*balance, *further_losses):
            main = main + (term - term.detach()).to(main.dtype)
        return main

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.feedforward, MoE) for layer in self.spec.layers)

    def _further_losses(self, state: Tensor, carried: Carried) -> list[Tensor]:
        """Return the multi-token prediction losses, weighted: mtp_weight / depth each (equation 25), and the
        balance losses of their experts."""
        found = []
        depth = len(self.spec.mtp)
        assert carried.labels is not None
        for k in range(depth):
            tokens, ahead = further(carried.input_ids, carried.labels, carried.documents, k + 1)
            layer = self.model.layers[str(len(self.spec.layers) + k)]
            embedded = self.model.embed_tokens(tokens)
            state, balance = layer(state, embedded, carried.table, carried.borders, carried.tally)
            weights = None if carried.weights is None else carried.weights.roll(-k - 1, 1)
            loss = next_token_loss(state, self.head_weight, ahead, weights=weights)
            found.append(loss * (self.mtp_weight / depth))
            if balance is not None:
                found.append(balance.to(found[-1].dtype))
        return found


def initial_tensor(name: str, shape: tuple[int, ...], kind: str, spec: Model, seed: int) -> Tensor:
    """Return the random fp32 start of one parameter, on the CPU, the same under every layout.

    | kind | start |
    |---|---|
    | norm | ones |
    | bias, balance | zeros |
    | adapter | as peft makes it (adapter.py) |
    | o_proj, down_proj | normal, std / sqrt(2 * layers): the residual stream keeps its size with depth (GPT-2) |
    | all others | normal, std = spec.init_std |

    Each tensor has its own generator, seeded by (seed, name), so a rank can make just what it holds.
    """
    if kind == "norm":
        return torch.ones(shape)
    if kind in ("bias", "balance"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if kind == "adapter":
        return adapter_start(name, shape, generator)
    std = spec.init_std
    if "o_proj" in name or "down_proj" in name:
        std /= (2 * len(spec.layers)) ** 0.5
    return torch.empty(shape).normal_(0.0, std, generator=generator)
