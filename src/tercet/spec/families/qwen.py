"""Qwen 2, 2.5 and 3, dense and mixture of experts; DeepSeek-R1's Qwen distillates have the same shapes."""

from __future__ import annotations

from typing import Any

from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.moe import Gate, MoE
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.families.common import (
    GROUPED_SIZES,
    Config,
    Sizes,
    build_gqa,
    build_model,
    need,
    refuse_unbuilt,
    shared_sizes,
    shared_to_hf,
)
from tercet.spec.model import Balance, FeedForwardBlock, Layer, Model

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

SIZES = {
    **dict.fromkeys(("qwen2", "qwen3"), GROUPED_SIZES),
    "qwen3_moe": GROUPED_SIZES | {"experts", "experts_per_token", "expert_ffn", "normalize_experts"},
}


def _qwen2(width: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Sizes:
    return {
        "family": "qwen2",
        "vocabulary": 152_064,
        "width": width,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "rope_theta": 1_000_000.0,
        "context_tokens": 131_072,
        **more,
    }


def _qwen3(width: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Sizes:
    return {
        "family": "qwen3",
        "vocabulary": 151_936,
        "width": width,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "context_tokens": 40_960,
        **more,
    }


# Each preset's numbers are those of the config.json of the hub repository named beside it.
PRESETS: dict[str, Sizes] = {
    # deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B, -7B, -14B, -32B
    "deepseek-r1-distill-qwen-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocabulary=151_936, rope_theta=10_000.0),
    "deepseek-r1-distill-qwen-7b": _qwen2(3584, 18_944, 28, 28, 4, rope_theta=10_000.0),
    "deepseek-r1-distill-qwen-14b": _qwen2(5120, 13_824, 48, 40, 8, norm_eps=1e-5),
    "deepseek-r1-distill-qwen-32b": _qwen2(5120, 27_648, 64, 40, 8, norm_eps=1e-5),
    # Qwen/Qwen2.5-0.5B, -1.5B, -3B, -7B, -14B, -32B
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocabulary=151_936, tied=True, context_tokens=32_768),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocabulary=151_936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11_008, 36, 16, 2, vocabulary=151_936, tied=True, context_tokens=32_768),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(5120, 13_824, 48, 40, 8, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(5120, 27_648, 64, 40, 8, norm_eps=1e-5),
    # Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, 8),
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": _qwen3(
        2048,
        6144,
        48,
        32,
        4,
        family="qwen3_moe",
        experts=128,
        experts_per_token=8,
        expert_ffn=768,
        normalize_experts=True,
        batch_balance=0.001,
    ),
}

HUB = {
    **{
        f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{s}": f"deepseek-r1-distill-qwen-{s.lower()}"
        for s in ("1.5B", "7B", "14B", "32B")
    },
    **{f"Qwen/Qwen2.5-{s}": f"qwen2.5-{s.lower()}" for s in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")},
    **{f"Qwen/Qwen3-{s}": f"qwen3-{s.lower()}" for s in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")},
}


def build(sizes: Sizes, name: str = "") -> Model:
    """Return the Model of plain sizes. Raises InputError for sizes that cannot work together."""
    family = sizes["family"]
    if sizes.get("head_dim") is None and family != "qwen2" and sizes["width"] % sizes["heads"]:
        sizes = {**sizes, "head_dim": 128}  # Qwen 3 does not tie the head's size to the width
    bias = bool(sizes.get("attention_bias", family == "qwen2"))
    layers = []
    for n in range(sizes["layers"]):
        window = sizes.get("window") if n >= (sizes.get("window_from") or 0) else None
        if sizes.get("window_layers") is not None:
            window = sizes.get("window") if n in sizes["window_layers"] else None
        attention = build_gqa(
            sizes, bias=bias, output_bias=bias and family != "qwen2", qk_norm=family != "qwen2", window=window
        )
        layers.append(Layer(attention, _feedforward(sizes, family, n)))
    balance = Balance(batch_loss=sizes.get("batch_balance") or 0.0)
    return build_model(sizes, name, family, layers=tuple(layers), balance=balance)


def _feedforward(sizes: Sizes, family: str, n: int) -> FeedForwardBlock:
    if (
        family != "qwen3_moe"
        or n in (sizes.get("dense_layer_numbers") or ())
        or (n + 1) % (sizes.get("sparse_step") or 1)
    ):
        return SwiGLU(sizes["ffn"])
    need(sizes, ("experts", "experts_per_token", "expert_ffn"), family)
    gate = Gate(normalize=bool(sizes.get("normalize_experts", False)))
    return MoE(sizes["experts"], sizes["experts_per_token"], sizes["expert_ffn"], gate=gate)


def from_hf(config: Config) -> Sizes:
    """Return our sizes from a Hugging Face config (hub's style or transformers 5's)."""
    family = config["model_type"]
    refuse_unbuilt(config, {})
    sizes: Sizes = {
        "family": family,
        **shared_sizes(config),
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim", 128 if family == "qwen3" else None),
        "attention_bias": family == "qwen2" or config.get("attention_bias", False),
    }
    if config.get("use_sliding_window") and config.get("sliding_window") is not None:
        sizes["window"] = config["sliding_window"]
        if family != "qwen3_moe":  # that one slides in every layer
            sizes["window_from"] = config.get("max_window_layers", 28)
            if kinds := config.get("layer_types"):
                sizes["window_layers"] = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    if family == "qwen3_moe":
        sizes |= {
            "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn": config["moe_intermediate_size"],
            "normalize_experts": config.get("norm_topk_prob", False),
            "sparse_step": config.get("decoder_sparse_step", 1),
            "dense_layer_numbers": tuple(config.get("mlp_only_layers") or ()),
            "batch_balance": config.get("router_aux_loss_coef", 0.001),
        }
    return sizes


def to_hf(model: Model) -> dict[str, Any]:
    """Return the Hugging Face config.json of a model, without dtype and token ids."""
    first = model.layers[0].attention
    assert isinstance(first, GQA)
    windows = [layer.attention.window for layer in model.layers]  # type: ignore[attr-defined]
    window = next((w for w in windows if w is not None), None)
    own: dict[str, Any] = {
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": next((n for n, w in enumerate(windows) if w is not None), len(windows)),
    }
    dense = next((f.ffn for f in (la.feedforward for la in model.layers) if isinstance(f, SwiGLU)), None)
    if model.family != "qwen2":
        own["attention_bias"] = first.bias
    if model.family != "qwen3_moe":
        own["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
        return {**shared_to_hf(model, ARCHITECTURES[model.family]), **own, "intermediate_size": dense}
    moe = next(f for f in (la.feedforward for la in model.layers) if isinstance(f, MoE))
    own |= {
        "intermediate_size": dense or 3 * moe.ffn,  # unused when every layer has experts
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.gate.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, la in enumerate(model.layers) if isinstance(la.feedforward, SwiGLU)],
        "router_aux_loss_coef": model.balance.batch_loss,
    }
    return {**shared_to_hf(model, ARCHITECTURES[model.family]), **own}
