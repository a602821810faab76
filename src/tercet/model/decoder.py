"""The decoder: embeddings, layers, head. Module names are transformers' names, so tensors need no renaming."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from tercet.model.attention import Documents
from tercet.model.gqa import Attention, Cache
from tercet.model.norm import RMSNorm
from tercet.model.objective import next_token_loss
from tercet.model.rope import rotary_table
from tercet.model.swiglu import FeedForward
from tercet.spec.model import Layer, Model


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); x is (batch, tokens, width)."""

    def __init__(self, layer: Layer, model: Model):
        super().__init__()
        self.self_attn = Attention(layer.attention, model.width)
        self.mlp = FeedForward(layer.feedforward, model.width)
        self.input_layernorm = RMSNorm(model.width, model.norm_eps)
        self.post_attention_layernorm = RMSNorm(model.width, model.norm_eps)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], documents: Documents | None = None, cache: Cache | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table, documents, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything below the head. Layers are keyed by number, so a part of them keeps its names."""

    def __init__(self, model: Model):
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleDict({str(n): DecoderLayer(layer, model) for n, layer in enumerate(model.layers)})
        self.norm = RMSNorm(model.width, model.norm_eps)


class Decoder(nn.Module):
    """A language model of `spec` (tercet.spec.model.Model); build under torch.device("meta") to allocate later."""

    def __init__(self, spec: Model):
        super().__init__()
        self.spec = spec
        self.model = Body(spec)
        self.lm_head = None if spec.tied else nn.Linear(spec.width, spec.vocabulary, bias=False)

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Tensor:
        """Return logits (batch, tokens, vocabulary), or with `labels` the summed loss, a scalar.

        input_ids, positions, labels: (batch, tokens) integers. documents: (documents + 1,) borders over the
        batch * tokens flattened tokens; without them each row is one document. labels are already shifted.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        borders = None if documents is None else Documents.of(documents, input_ids.device)
        x = self.model.embed_tokens(input_ids)
        table = rotary_table(self.spec.rope, self.spec.layers[0].attention.head_dim, positions, x.dtype)
        for n, layer in enumerate(self.model.layers.values()):
            x = layer(x, table, borders, None if caches is None else caches[n])
        x = self.model.norm(x)
        if labels is None:
            return nn.functional.linear(x, self.head_weight)
        return next_token_loss(x, self.head_weight, labels)


def initial_tensor(name: str, shape: tuple[int, ...], kind: str, spec: Model, seed: int) -> Tensor:
    """Return the random fp32 start of one parameter, on the CPU, the same under every layout.

    | kind | start |
    |---|---|
    | norm | ones |
    | bias | zeros |
    | o_proj, down_proj | normal, std / sqrt(2 * layers): the residual stream keeps its size with depth (GPT-2) |
    | all others | normal, std = spec.init_std |

    Each tensor has its own generator, seeded by (seed, name), so a rank can make just what it holds.
    """
    if kind == "norm":
        return torch.ones(shape)
    if kind == "bias":
        return torch.zeros(shape)
    std = spec.init_std
    if "o_proj" in name or "down_proj" in name:
        std /= (2 * len(spec.layers)) ** 0.5
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
