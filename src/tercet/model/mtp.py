"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). Twin of spec/blocks/mtp.py.

Depth k predicts, at position t, the token at t + k + 1 from the state of depth k - 1 at t and the embedding of
token t + k. State of depth 0 is the main model's output after its final norm; each depth hands on its own
normed output. Positions whose further tokens lie in another document are computed but not trained; being the
last of their document, they are not seen by any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercet.model.attention import Documents
from tercet.model.balance import Tally, document_numbers
from tercet.model.linear import Linear
from tercet.model.norm import RMSNorm
from tercet.model.rope import Table
from tercet.spec.blocks.mtp import MTP
from tercet.spec.model import Model
from tercet.spec.objective import IGNORED


class SharedHead(nn.Module):
    """Holds the norm; the head itself is the main model's."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm = RMSNorm(model.width, model.norm_eps)


class PredictionLayer(nn.Module):
    """(state, embedding) of shape (batch, tokens, width) -> (next state, balance loss)."""

    def __init__(self, spec: MTP, model: Model, layer: nn.Module):
        super().__init__()
        self.enorm = RMSNorm(model.width, model.norm_eps)
        self.hnorm = RMSNorm(model.width, model.norm_eps)
        self.eh_proj = Linear(2 * model.width, model.width, bias=False)
        # The layer's own parts, not the layer: files name them without a level between.
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.shared_head = SharedHead(model)

    def forward(
        self, state: Tensor, embedded: Tensor, table: Table, documents: Documents | None, tally: Tally | None
    ) -> tuple[Tensor, Tensor | None]:
        from tercet.model.decoder import run_layer

        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1))
        x, loss = run_layer(self, x, table, documents, None, tally)
        return self.shared_head.norm(x), loss


def further(input_ids: Tensor, labels: Tensor, documents: Tensor | None, depth: int) -> tuple[Tensor, Tensor]:
    """Return (tokens `depth` ahead, labels `depth` ahead), both (batch, tokens); IGNORED across documents."""
    tokens = input_ids.roll(-depth, 1)
    ahead = labels.roll(-depth, 1)
    ahead[:, -depth:] = IGNORED
    if documents is not None:
        number = document_numbers(documents, input_ids.numel(), input_ids.device).view_as(input_ids)
        ahead = ahead.masked_fill(number.roll(-depth, 1) != number, IGNORED)
    return tokens, ahead
