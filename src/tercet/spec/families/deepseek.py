"""DeepSeek: MoE (V1), V2, V2-Lite, V3 and R1. DeepSeek LLM and Coder have Llama shapes: see llama.py."""

from __future__ import annotations

from typing import Any

from tercet.errors import InputError
from tercet.spec.blocks.mla import MLA
from tercet.spec.blocks.moe import Gate, MoE
from tercet.spec.blocks.mtp import MTP
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.families.common import (
    GROUPED_SIZES,
    SHARED_SIZES,
    Config,
    Sizes,
    build_gqa,
    build_model,
    need,
    refuse_unbuilt,
    shared_sizes,
    shared_to_hf,
)
from tercet.spec.model import AttentionBlock, Balance, Layer, Model

ARCHITECTURES = {
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

_EXPERT_SIZES = {"experts", "experts_per_token", "shared_experts", "expert_ffn", "dense_layers"}
_LATENT_SIZES = {
    "q_rank",
    "kv_rank",
    "nope_dim",
    "rope_dim",
    "value_dim",
    "expert_groups",
    "groups_per_token",
    "expert_scale",
}
SIZES = {
    "deepseek": GROUPED_SIZES | _EXPERT_SIZES | {"normalize_experts"},
    "deepseek_v2": SHARED_SIZES | _EXPERT_SIZES | _LATENT_SIZES,
    "deepseek_v3": SHARED_SIZES | _EXPERT_SIZES | _LATENT_SIZES | {"normalize_experts", "mtp_depth"},
}

_YARN = {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_V2_YARN = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_V3_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_V3: Sizes = {
    "family": "deepseek_v3",
    "vocabulary": 129_280,
    "width": 7168,
    "layers": 61,
    "heads": 128,
    "ffn": 18_432,
    "q_rank": 1536,
    "kv_rank": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "value_dim": 128,
    "experts": 256,
    "experts_per_token": 8,
    "shared_experts": 1,
    "expert_ffn": 2048,
    "dense_layers": 3,
    "expert_groups": 8,
    "groups_per_token": 4,
    "expert_scale": 2.5,
    "normalize_experts": True,
    "mtp_depth": 1,
    "context_tokens": 163_840,
    "rope_scaling": _V3_YARN,
}

# Each preset's numbers are those of the config.json of the hub repository named beside it; how experts
# are balanced, which configs do not hold, follows from the papers: see build().
PRESETS: dict[str, Sizes] = {
    # deepseek-ai/deepseek-moe-16b-base; arXiv 2401.06066
    "deepseek-moe-16b": {
        "family": "deepseek",
        "vocabulary": 102_400,
        "width": 2048,
        "layers": 28,
        "heads": 16,
        "ffn": 10_944,
        "experts": 64,
        "experts_per_token": 6,
        "shared_experts": 2,
        "expert_ffn": 1408,
        "dense_layers": 1,
        "context_tokens": 4096,
    },
    # deepseek-ai/DeepSeek-V2-Lite; arXiv 2405.04434
    "deepseek-v2-lite": {
        "family": "deepseek_v2",
        "vocabulary": 102_400,
        "width": 2048,
        "layers": 27,
        "heads": 16,
        "ffn": 10_944,
        "q_rank": None,
        "kv_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
        "experts": 64,
        "experts_per_token": 6,
        "shared_experts": 2,
        "expert_ffn": 1408,
        "dense_layers": 1,
        "context_tokens": 163_840,
        "rope_scaling": _V2_YARN,
    },
    # deepseek-ai/DeepSeek-V2; arXiv 2405.04434
    "deepseek-v2": {
        "family": "deepseek_v2",
        "vocabulary": 102_400,
        "width": 5120,
        "layers": 60,
        "heads": 128,
        "ffn": 12_288,
        "q_rank": 1536,
        "kv_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
        "experts": 160,
        "experts_per_token": 6,
        "shared_experts": 2,
        "expert_ffn": 1536,
        "dense_layers": 1,
        "expert_groups": 8,
        "groups_per_token": 3,
        "expert_scale": 16.0,
        "context_tokens": 163_840,
        "rope_scaling": _V2_YARN,
    },
    # deepseek-ai/DeepSeek-V3; arXiv 2412.19437
    "deepseek-v3": _V3,
    # deepseek-ai/DeepSeek-R1: V3's shapes
    "deepseek-r1": _V3,
    # Ours: everything V3 has, small enough for two CPU cores.
    "deepseek-v3-tiny": {
        "family": "deepseek_v3",
        "vocabulary": 4096,
        "width": 192,
        "layers": 4,
        "heads": 4,
        "ffn": 512,
        "q_rank": 96,
        "kv_rank": 64,
        "nope_dim": 32,
        "rope_dim": 16,
        "value_dim": 32,
        "experts": 16,
        "experts_per_token": 4,
        "shared_experts": 1,
        "expert_ffn": 96,
        "dense_layers": 1,
        "expert_groups": 4,
        "groups_per_token": 2,
        "expert_scale": 2.5,
        "normalize_experts": True,
        "mtp_depth": 1,
        "context_tokens": 512,
    },
}

HUB = {
    "deepseek-ai/deepseek-moe-16b-base": "deepseek-moe-16b",
    "deepseek-ai/deepseek-moe-16b-chat": "deepseek-moe-16b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V2": "deepseek-v2",
    "deepseek-ai/DeepSeek-V2-Chat": "deepseek-v2",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-r1",
}

_LATENT = ("kv_rank", "nope_dim", "rope_dim", "value_dim")
_EXPERTS = ("experts", "experts_per_token", "expert_ffn")


def build(sizes: Sizes, name: str = "") -> Model:
    """Return the Model of plain sizes. Raises InputError for sizes that cannot work together."""
    family = sizes["family"]
    attention = _attention(sizes, family)
    dense = SwiGLU(sizes["ffn"], family == "deepseek_v2" and bool(sizes.get("mlp_bias", False)))
    sparse = _experts(sizes, family)
    first = sizes["layers"] if sparse is None else min(sizes.get("dense_layers") or 0, sizes["layers"])
    layers = (Layer(attention, dense),) * first
    if sparse is not None:
        layers += (Layer(attention, sparse),) * (sizes["layers"] - first)
    depth = sizes.get("mtp_depth") or 0
    if depth and family != "deepseek_v3":
        raise InputError(f"model.mtp_depth is {depth}; only deepseek_v3 predicts further tokens, {family} does not")
    third = family == "deepseek_v3"
    balance = Balance()
    if sparse is not None:
        balance = Balance(
            bias_speed=_or(sizes.get("bias_speed"), 0.001) if third else 0.0,
            sequence_loss=_or(sizes.get("sequence_balance"), 0.0001 if third else 0.001),
            batch_loss=_or(sizes.get("batch_balance"), 0.0),
        )
    extra = (MTP(Layer(attention, sparse or dense)),) * depth
    return build_model(sizes, name, family, layers=layers, mtp=extra, balance=balance)


def _or(given: float | None, default: float) -> float:
    return default if given is None else float(given)


def _attention(sizes: Sizes, family: str) -> AttentionBlock:
    bias = bool(sizes.get("attention_bias", False))
    if family == "deepseek":
        return build_gqa(sizes, bias=bias, output_bias=bias)
    need(sizes, _LATENT, family)
    if sizes["rope_dim"] % 2:
        raise InputError(f"model.rope_dim is {sizes['rope_dim']}; rotary embedding needs an even number")
    return MLA(
        heads=sizes["heads"],
        kv_rank=sizes["kv_rank"],
        nope_dim=sizes["nope_dim"],
        rope_dim=sizes["rope_dim"],
        value_dim=sizes["value_dim"],
        q_rank=sizes.get("q_rank") or None,
        bias=bias,
        interleaved=bool(sizes.get("rope_interleaved", True)),
        fp32_rotation=family == "deepseek_v2",
    )


def _experts(sizes: Sizes, family: str) -> MoE | None:
    if not sizes.get("experts"):
        return None
    need(sizes, _EXPERTS, family)
    experts, chosen = sizes["experts"], sizes["experts_per_token"]
    groups, kept = sizes.get("expert_groups") or 1, sizes.get("groups_per_token") or 1
    if chosen > experts:
        raise InputError(f"model.experts_per_token {chosen} exceeds model.experts {experts}")
    if experts % groups:
        raise InputError(f"model.experts {experts} is not divisible by model.expert_groups {groups}")
    if kept > groups or chosen > experts // groups * kept:
        raise InputError(
            f"model.groups_per_token {kept} of {groups} groups leaves {experts // groups * min(kept, groups)} "
            f"experts to choose {chosen} from"
        )
    gate = Gate(
        scoring="sigmoid" if family == "deepseek_v3" else "softmax",
        groups=groups,
        kept_groups=kept,
        group_score="top2" if family == "deepseek_v3" else "max",
        bias=family == "deepseek_v3",
        # DeepSeek's own V2 code and transformers differ for norm_topk_prob, which no published V2 sets: the
        # weights stay as they are and are scaled, as in transformers.
        normalize=family != "deepseek_v2" and bool(sizes.get("normalize_experts", False)),
        scale=float(sizes.get("expert_scale") or 1.0),
    )
    return MoE(experts, chosen, sizes["expert_ffn"], sizes.get("shared_experts") or 0, gate)


def from_hf(config: Config) -> Sizes:
    """Return our sizes from a Hugging Face config (hub's style or transformers 5's)."""
    family = config["model_type"]
    refuse_unbuilt(
        config,
        {
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",) if family == "deepseek_v3" else ("softmax",),
            **({"topk_method": ("noaux_tc",)} if family == "deepseek_v3" else {}),
            **({"topk_method": ("greedy", "group_limited_greedy")} if family == "deepseek_v2" else {}),
        },
    )
    alpha, within_rows = config.get("aux_loss_alpha"), config.get("seq_aux", True)
    sizes: Sizes = {
        "family": family,
        **shared_sizes(config),
        "attention_bias": config.get("attention_bias", False),
        "experts": config.get("n_routed_experts"),
        "experts_per_token": config.get("num_experts_per_tok"),
        "shared_experts": config.get("n_shared_experts"),
        "expert_ffn": config.get("moe_intermediate_size"),
        "dense_layers": config.get("first_k_dense_replace", 3 if family == "deepseek_v3" else 0),
        "normalize_experts": config.get("norm_topk_prob", family == "deepseek_v3"),
        "sequence_balance": alpha if within_rows else 0.0,
        "batch_balance": 0.0 if within_rows else alpha,
    }
    if family == "deepseek":
        kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return {**sizes, "kv_heads": kv_heads, "head_dim": config.get("head_dim")}
    sizes |= {
        "q_rank": config.get("q_lora_rank", 1536),
        "kv_rank": config["kv_lora_rank"],
        "nope_dim": config["qk_nope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"],
        "value_dim": config["v_head_dim"],
        "expert_scale": config.get("routed_scaling_factor", 2.5 if family == "deepseek_v3" else 1.0),
    }
    if family == "deepseek_v2":
        sizes |= {"mlp_bias": config.get("mlp_bias", False)}
        if config.get("topk_method", "greedy") == "group_limited_greedy":
            sizes |= {"expert_groups": config["n_group"], "groups_per_token": config["topk_group"]}
        return sizes
    return sizes | {
        "expert_groups": config.get("n_group") or 8,
        "groups_per_token": config.get("topk_group") or 4,
        "rope_interleaved": config.get("rope_interleave", True),
        "mtp_depth": config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0,
    }


def to_hf(model: Model) -> dict[str, Any]:
    """Return the Hugging Face config.json of a model, without dtype and token ids."""
    attention: Any = model.layers[0].attention
    experts = next((la.feedforward for la in model.layers if isinstance(la.feedforward, MoE)), None)
    dense = next((la.feedforward for la in model.layers if isinstance(la.feedforward, SwiGLU)), None)
    first = next((n for n, la in enumerate(model.layers) if isinstance(la.feedforward, MoE)), len(model.layers))
    own: dict[str, Any] = {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": getattr(attention, "kv_heads", attention.heads),
        "attention_bias": attention.bias,
        "intermediate_size": dense.ffn if dense else 3 * experts.ffn,  # type: ignore[union-attr]
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid" if model.family == "deepseek_v3" else "softmax",
        "aux_loss_alpha": model.balance.sequence_loss or model.balance.batch_loss,
        "seq_aux": not model.balance.batch_loss,
    }
    if experts is not None:
        own |= {
            "n_routed_experts": experts.experts,
            "num_experts_per_tok": experts.experts_per_token,
            "n_shared_experts": experts.shared_experts,
            "moe_intermediate_size": experts.ffn,
            "norm_topk_prob": experts.gate.normalize,
        }
    if isinstance(attention, MLA):
        gate = experts.gate if experts is not None else Gate()
        own |= {
            "q_lora_rank": attention.q_rank,
            "kv_lora_rank": attention.kv_rank,
            "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim,
            "v_head_dim": attention.value_dim,
            "n_group": gate.groups,
            "topk_group": gate.kept_groups,
            "routed_scaling_factor": gate.scale,
        }
        if model.family == "deepseek_v3":
            own |= {
                "topk_method": "noaux_tc",
                "rope_interleave": attention.interleaved,
                "num_nextn_predict_layers": len(model.mtp),
            }
        else:
            grouped = gate.groups > 1
            own |= {
                "topk_method": "group_limited_greedy" if grouped else "greedy",
                "mlp_bias": bool(dense and dense.bias),
            }
    else:
        own["head_dim"] = attention.head_dim
    return {**shared_to_hf(model, ARCHITECTURES[model.family]), **own}
