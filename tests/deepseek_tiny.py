"""DeepSeek-type tiny models for tests: latent attention with ranks 16 and 8, rotary part 8, experts from layer 2."""

from __future__ import annotations

from typing import Any

from tercet.spec.model import Model
from tests.tiny import tiny_model


def tiny_deepseek(**sizes: Any) -> Model:
    """8 experts, 2 per token, one shared, one further prediction; sizes that three does not divide."""
    sizes = {**({"normalize_experts": None} if sizes.get("family") == "deepseek_v2" else {}), **sizes}
    return tiny_model(
        **{
            "family": "deepseek_v3",
            "q_rank": 16,
            "kv_rank": 8,
            "nope_dim": 8,
            "rope_dim": 8,
            "value_dim": 12,
            "kv_heads": None,
            "experts": 8,
            "experts_per_token": 2,
            "shared_experts": 1,
            "expert_ffn": 12,
            "dense_layers": 1,
            "expert_groups": 2,
            "groups_per_token": 1,
            "normalize_experts": True,
            "expert_scale": 2.5,
            "mtp_depth": 1,
            **sizes,
        }
    )
