"""Random tiny models of every family, built and saved by transformers: the reference that ours must equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
QWEN_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **settings}}


# name -> (model_type, what differs from BASE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-no-grouping-biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "llama-linear": ("llama", rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": ("llama", {"max_position_embeddings": 24, **rope(rope_type="dynamic", factor=2.0)}),
    "llama-llama3": (
        "llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
            rope_theta=500.0,
        ),
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-attention-factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 8.0, "truncate": False}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias-yarn": ("qwen3", {"head_dim": 12, "attention_bias": True, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {**QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-groups-bias": (
        "deepseek_v2",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "attention_bias": True,
            "v_head_dim": 20,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-odd": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_interleave": False,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3-dense": (
        "deepseek_v3",
        {**LATENT, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
}


def reference(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return transformers' model of a case, every tensor random: norms, biases and balancing biases too."""
    kind, settings = CASES[name]
    config = AutoConfig.for_model(kind, **{**BASE, **settings})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if "norm" in tensor_name:
                p.copy_(1.0 + 0.2 * noise)
            elif p.dim() == 1:
                p.copy_(0.2 * noise)
            else:
                p.copy_(noise * (1.0 if "embed" in tensor_name else 0.6 * p.shape[-1] ** -0.5))
        for buffer_name, b in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return model


def tokens(rows: int = 2, length: int = 33, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def save(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: Tensor, theirs: Tensor, bound: float, what: str) -> None:
    """Compare by the largest difference over the largest value: rounding grows with size."""
    scale = max(theirs.abs().max().item(), 1e-3)
    worst = (ours.double() - theirs.double()).abs().max().item() / scale
    assert worst <= bound, f"{what}: differs by {worst:.1e} of its largest value {scale:.2g}, allowed {bound:.0e}"
