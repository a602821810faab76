"""Tiny random models of architectures that Tercet has not, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    # Parallel residual, layer norms and matrices with biases, a part of each head rotated; its head has another name
    # on disk than in memory.
    "gpt_neox": {},
    # Tied, scaled embedding, norms that add one, soft caps on scores and logits, windows of 5 tokens in every other layer.
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 5.0,
    },
    "phi3": {"num_key_value_heads": 2},  # queries, keys and values in one matrix; so gate and up
    "olmo2": {"num_key_value_heads": 2},  # norms behind attention and feed-forward, and over all queries and keys
}


def save_tiny(folder: Path, kind: str, **sizes: Any) -> Path:
    """Write config.json and random weights, large enough that every part of the model shows in its logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **sizes})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """Return transformers' own model of a folder, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
