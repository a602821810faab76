"""Llama shapes: Llama 1–3, DeepSeek LLM and Coder, SmolLM2, and models made here."""

from __future__ import annotations

from typing import Any

from tercet.errors import InputError
from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.model import Layer, Model, Rope

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"

# name -> sizes; sources stand beside each.
PRESETS: dict[str, dict[str, Any]] = {
    # Document 1's sizes with SwiGLU of 5632: 1.23 B without embeddings.
    "llama-1.2b-32k": {"vocabulary": 32_000, "width": 2048, "layers": 24, "heads": 16, "ffn": 5632,
                       "context_tokens": 2048},
    # Ours: small enough for two CPU cores.
    "first-light": {"vocabulary": 4096, "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 704,
                    "context_tokens": 512, "tied": True},
}  # fmt: skip


def build(sizes: dict[str, Any], name: str = "") -> Model:
    """Return the Model of plain sizes. Raises InputError for sizes that cannot work together."""
    width, heads = sizes["width"], sizes["heads"]
    kv_heads = sizes.get("kv_heads") or heads
    head_dim = sizes.get("head_dim")
    if head_dim is None:
        if width % heads:
            valid = [h for h in range(1, width + 1) if width % h == 0 and (width // h) % 2 == 0]
            near = sorted(sorted(valid, key=lambda h: abs(h - heads))[:3])
            raise InputError(
                f"model.width {width} is not divisible by model.heads {heads}",
                f"Nearest numbers of heads that divide it: {', '.join(map(str, near))}; or set model.head_dim.",
            )
        head_dim = width // heads
    if head_dim % 2:
        raise InputError(f"model.head_dim is {head_dim}; rotary embedding needs an even number")
    if heads % kv_heads:
        valid = [k for k in range(1, heads + 1) if heads % k == 0]
        near = sorted(sorted(valid, key=lambda k: abs(k - kv_heads))[:3])
        raise InputError(
            f"model.heads {heads} is not divisible by model.kv_heads {kv_heads}",
            f"Nearest numbers of key-value heads that divide it: {', '.join(map(str, near))}.",
        )
    layer = Layer(GQA(heads, kv_heads, head_dim), SwiGLU(sizes["ffn"]))
    return Model(
        family=MODEL_TYPE,
        name=name,
        vocabulary=sizes["vocabulary"],
        width=width,
        layers=(layer,) * sizes["layers"],
        tied=bool(sizes.get("tied", False)),
        norm_eps=sizes.get("norm_eps") or 1e-6,
        rope=Rope(theta=sizes.get("rope_theta") or 10_000.0),
        context_tokens=sizes.get("context_tokens") or 2048,
    )


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Return our sizes from a Hugging Face config (hub's style or transformers 5's)."""
    rope = config.get("rope_parameters") or {}
    return {
        "vocabulary": config["vocab_size"],
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim"),
        "ffn": config["intermediate_size"],
        "tied": config.get("tie_word_embeddings", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "context_tokens": config.get("max_position_embeddings", 2048),
    }


def to_hf(model: Model) -> dict[str, Any]:
    """Return the Hugging Face config.json of a model, without dtype and token ids."""
    attention = model.layers[0].attention
    feedforward = model.layers[0].feedforward
    assert isinstance(attention, GQA) and isinstance(feedforward, SwiGLU)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": feedforward.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": model.context_tokens,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": model.init_std,
    }
