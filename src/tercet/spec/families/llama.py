"""Llama shapes: Llama 1–3, Mistral, DeepSeek LLM and Coder, SmolLM2, and models made here."""

from __future__ import annotations

from typing import Any

from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.families.common import (
    GROUPED_SIZES,
    Config,
    Sizes,
    build_gqa,
    build_model,
    refuse_unbuilt,
    shared_sizes,
    shared_to_hf,
)
from tercet.spec.model import Layer, Model

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

SIZES = dict.fromkeys(ARCHITECTURES, GROUPED_SIZES)

_LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_2 = {**_LLAMA_3_1, "factor": 32.0}
_CODER = {"rope_type": "linear", "factor": 4.0}

# Each preset's numbers are those of the config.json of the hub repository named beside it.
PRESETS: dict[str, dict[str, Any]] = {
    # Document 1's sizes with SwiGLU of 5632: 1.23 B without embeddings.
    "llama-1.2b-32k": {
        "vocabulary": 32_000,
        "width": 2048,
        "layers": 24,
        "heads": 16,
        "ffn": 5632,
        "context_tokens": 2048,
    },
    # Ours: small enough for two CPU cores.
    "first-light": {
        "vocabulary": 1024,
        "width": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 704,
        "context_tokens": 512,
        "tied": True,
    },
    # deepseek-ai/deepseek-llm-7b-base
    "deepseek-llm-7b": {
        "vocabulary": 102_400,
        "width": 4096,
        "layers": 30,
        "heads": 32,
        "ffn": 11_008,
        "context_tokens": 4096,
    },
    # deepseek-ai/deepseek-llm-67b-base
    "deepseek-llm-67b": {
        "vocabulary": 102_400,
        "width": 8192,
        "layers": 95,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 22_016,
        "context_tokens": 4096,
    },
    # deepseek-ai/deepseek-coder-1.3b-base
    "deepseek-coder-1.3b": {
        "vocabulary": 32_256,
        "width": 2048,
        "layers": 24,
        "heads": 16,
        "ffn": 5504,
        "context_tokens": 16_384,
        "rope_theta": 100_000.0,
        "rope_scaling": _CODER,
    },
    # deepseek-ai/deepseek-coder-6.7b-base
    "deepseek-coder-6.7b": {
        "vocabulary": 32_256,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "ffn": 11_008,
        "context_tokens": 16_384,
        "rope_theta": 100_000.0,
        "rope_scaling": _CODER,
    },
    # deepseek-ai/DeepSeek-R1-Distill-Llama-8B
    "deepseek-r1-distill-llama-8b": {
        "vocabulary": 128_256,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14_336,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_1,
        "norm_eps": 1e-5,
    },
    # deepseek-ai/DeepSeek-R1-Distill-Llama-70B
    "deepseek-r1-distill-llama-70b": {
        "vocabulary": 128_256,
        "width": 8192,
        "layers": 80,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28_672,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_1,
        "norm_eps": 1e-5,
    },
    # meta-llama/Llama-2-7b-hf
    "llama-2-7b": {
        "vocabulary": 32_000,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "ffn": 11_008,
        "context_tokens": 4096,
        "norm_eps": 1e-5,
    },
    # meta-llama/Llama-3.1-8B
    "llama-3.1-8b": {
        "vocabulary": 128_256,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14_336,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_1,
        "norm_eps": 1e-5,
    },
    # meta-llama/Llama-3.1-70B
    "llama-3.1-70b": {
        "vocabulary": 128_256,
        "width": 8192,
        "layers": 80,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28_672,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_1,
        "norm_eps": 1e-5,
    },
    # meta-llama/Llama-3.2-1B
    "llama-3.2-1b": {
        "vocabulary": 128_256,
        "width": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 8192,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_2,
        "norm_eps": 1e-5,
        "tied": True,
    },
    # meta-llama/Llama-3.2-3B
    "llama-3.2-3b": {
        "vocabulary": 128_256,
        "width": 3072,
        "layers": 28,
        "heads": 24,
        "kv_heads": 8,
        "ffn": 8192,
        "context_tokens": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA_3_2,
        "norm_eps": 1e-5,
        "tied": True,
    },
    # mistralai/Mistral-7B-v0.3
    "mistral-7b": {
        "family": "mistral",
        "vocabulary": 32_768,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14_336,
        "context_tokens": 32_768,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
    },
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": {
        "vocabulary": 49_152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "ffn": 1536,
        "context_tokens": 8192,
        "rope_theta": 100_000.0,
        "norm_eps": 1e-5,
        "tied": True,
        "init_std": 0.041666666666666664,
    },
}

# Hub name -> preset, for planning without a download.
HUB = {
    "deepseek-ai/deepseek-llm-7b-base": "deepseek-llm-7b",
    "deepseek-ai/deepseek-llm-7b-chat": "deepseek-llm-7b",
    "deepseek-ai/deepseek-llm-67b-base": "deepseek-llm-67b",
    "deepseek-ai/deepseek-llm-67b-chat": "deepseek-llm-67b",
    "deepseek-ai/deepseek-coder-1.3b-base": "deepseek-coder-1.3b",
    "deepseek-ai/deepseek-coder-1.3b-instruct": "deepseek-coder-1.3b",
    "deepseek-ai/deepseek-coder-6.7b-base": "deepseek-coder-6.7b",
    "deepseek-ai/deepseek-coder-6.7b-instruct": "deepseek-coder-6.7b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "deepseek-r1-distill-llama-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "deepseek-r1-distill-llama-70b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
}


def build(sizes: Sizes, name: str = "") -> Model:
    """Return the Model of plain sizes. Raises InputError for sizes that cannot work together."""
    bias = bool(sizes.get("attention_bias", False))
    attention = build_gqa(sizes, bias=bias, output_bias=bias, window=sizes.get("window"))
    layer = Layer(attention, SwiGLU(sizes["ffn"], bool(sizes.get("mlp_bias", False))))
    return build_model(sizes, name, sizes.get("family") or "llama", layers=(layer,) * sizes["layers"])


def from_hf(config: Config) -> Sizes:
    """Return our sizes from a Hugging Face config (hub's style or transformers 5's)."""
    family = config["model_type"]
    refuse_unbuilt(config, {})
    mistral = family == "mistral"  # its class fills absent keys with the first Mistral's numbers
    return {
        "family": family,
        **shared_sizes(config),
        "kv_heads": config.get("num_key_value_heads", 8 if mistral else None) or config["num_attention_heads"],
        "head_dim": config.get("head_dim"),
        "attention_bias": not mistral and config.get("attention_bias", False),
        "mlp_bias": not mistral and config.get("mlp_bias", False),
        "window": config.get("sliding_window", 4096) if mistral else None,
    }


def to_hf(model: Model) -> dict[str, Any]:
    """Return the Hugging Face config.json of a model, without dtype and token ids."""
    attention, feedforward = model.layers[0].attention, model.layers[0].feedforward
    assert isinstance(attention, GQA) and isinstance(feedforward, SwiGLU)
    own: dict[str, Any] = {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": feedforward.ffn,
    }
    if model.family == "mistral":
        own["sliding_window"] = attention.window
    else:
        own |= {"attention_bias": attention.bias, "mlp_bias": feedforward.bias}
    return {**shared_to_hf(model, ARCHITECTURES[model.family]), **own}
