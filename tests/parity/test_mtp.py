"""Multi-token prediction against transformers' own layers and a loss written out by hand, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from tercet.spec.families import FAMILIES
from tercet.spec.model import Balance
from tercet.weights.reading import fill, load_model, open_weights
from tests.parity import families

WEIGHT = 0.3


def further_layer(config, seed):
    layer = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 2).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.5 * p.shape[-1] ** -0.5)
        layer.mtp_block.mlp.gate.e_score_correction_bias.copy_(0.1 * torch.randn(8, generator=generator))
    return layer


def their_name(name: str) -> str:
    """Return transformers' name of a tensor of one further prediction (enorm, mtp_block.self_attn.…, post_norm)."""
    if name.startswith(("enorm", "hnorm", "eh_proj")):
        return name
    return "post_norm.weight" if name == "shared_head.norm.weight" else f"mtp_block.{name}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return (transformers' main model, its two further layers, ours with the same weights)."""
    theirs = families.reference("deepseek_v3", torch.float64)
    theirs.config._experts_implementation = "eager"
    layers = [further_layer(theirs.config, seed) for seed in (3, 4)]
    folder = families.save(theirs, tmp_path_factory.mktemp("main"))
    main = load_model(folder, "fp64")
    module = FAMILIES["deepseek_v3"]
    sizes = module.from_hf({**theirs.config.to_dict(), "num_nextn_predict_layers": 2})
    spec = module.build(sizes)
    tensors = dict(open_weights(folder, main.spec))
    for k, layer in enumerate(layers):
        state = dict(layer.state_dict())
        prefix = f"model.layers.{3 + k}."
        for t in (*spec.tensors(), *spec.buffers()):
            if t.name.startswith(prefix):
                tensors[t.name] = state[their_name(t.name.removeprefix(prefix))]
    ours = fill(spec, tensors.items(), torch.float64).train()
    ours.balance = Balance()
    ours.mtp_weight = WEIGHT
    return theirs, layers, ours


def their_loss(theirs, layers, ids, labels):
    """Return (main loss, weighted further losses), summed over tokens: each row is one document."""
    model = theirs.model
    hidden = model(ids).last_hidden_state
    positions = torch.arange(ids.shape[1])[None]
    rotary = model.rotary_emb(hidden, positions)
    mask = create_causal_mask(theirs.config, hidden, None, None, positions)

    def loss(state, labels):
        return F.cross_entropy(theirs.lm_head(state).flatten(0, 1), labels.flatten(), reduction="sum")

    main, extra, state, width = loss(hidden, labels), 0.0, hidden, ids.shape[1]
    for k, layer in enumerate(layers, start=1):
        # Shorter by one token each time, as the paper writes it; ours keeps the length and trains no such place.
        embedded = model.embed_tokens(ids[:, k:])
        kept = width - k
        state = layer(
            embedded,
            state[:, :kept],
            tuple(r[:, :kept] for r in rotary),
            mask[..., :kept, :kept],
            positions[:, :kept],
            None,
        )
        extra = extra + WEIGHT / len(layers) * loss(state, labels[:, k:])
    return main, extra


def test_loss_and_gradients(pair):
    theirs, layers, ours = pair
    ids = families.tokens(2, 21)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[1, 4:9] = -100
    main, extra = their_loss(theirs, layers, ids, labels)
    theirs.zero_grad()
    (main + extra).backward()
    loss = ours(ids, labels=labels)
    families.assert_close(loss, main, 1e-6, "the main loss, which alone is shown")
    ours.zero_grad()
    loss.backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    for k, layer in enumerate(layers):
        expected |= {f"{k}.{n}": p.grad for n, p in layer.named_parameters()}
    for name, p in ours.named_parameters():
        number = name.split(".")[2] if name.startswith("model.layers.") else "0"
        if int(number) >= 3:
            key = f"{int(number) - 3}.{their_name(name.removeprefix(f'model.layers.{number}.'))}"
        else:
            key = name
        families.assert_close(p.grad, expected[key], 1e-6, name)


def test_documents_of_a_packed_row_are_apart(pair):
    """Two documents in one row train as they do in rows of their own."""
    _, _, ours = pair
    a, b = families.tokens(1, 13), families.tokens(1, 8, seed=5)
    grads = []
    for packed in (True, False):
        ours.zero_grad()
        if packed:
            ids = torch.cat((a, b), 1)
            labels = torch.cat([F.pad(x[:, 1:], (0, 1), value=-100) for x in (a, b)], 1)
            positions = torch.cat((torch.arange(13), torch.arange(8)))[None]
            ours(ids, positions, torch.tensor([0, 13, 21]), labels).backward()
        else:
            for x in (a, b):
                ours(x, labels=F.pad(x[:, 1:], (0, 1), value=-100)).backward()
        grads.append({n: p.grad.clone() for n, p in ours.named_parameters()})
    for name in grads[0]:
        families.assert_close(grads[0][name], grads[1][name], 1e-6, name)  # the router is fp32


def test_evaluation_has_the_main_loss_only(pair):
    _, _, ours = pair
    ids = families.tokens(1, 9)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    quiet = copy.deepcopy(ours).eval()
    quiet(ids, labels=labels).backward()
    assert all(p.grad is None for n, p in quiet.named_parameters() if n.startswith("model.layers.3"))
