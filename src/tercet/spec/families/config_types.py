"""What values the keys of a config.json may have, before anything is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from tercet.errors import InputError

# Whole numbers: key -> (least, most). Far above every model, and low enough that a slip ends here and not in memory.
_WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), (1, 2**26)),
    **dict.fromkeys(("num_hidden_layers", "decoder_sparse_step"), (1, 1000)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_group", "topk_group"), (1, 2**16)),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (1, 2**20)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (1, 2**14)),
    **dict.fromkeys(("num_experts_per_tok",), (1, 2**14)),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "q_lora_rank"), (0, 2**20)),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), (0, 64)),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), (1, 2**40)),
    "max_window_layers": (0, 2**20),
}
_POSITIVE = ("rms_norm_eps", "initializer_range", "rope_theta", "routed_scaling_factor", "partial_rotary_factor")
_NUMBERS = ("aux_loss_alpha", "router_aux_loss_coef")
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_sliding_window",
    "seq_aux",
    "rope_interleave",
)
_SECTIONS = ("rope_scaling", "rope_parameters", "quantization_config")
_LISTS: dict[str, type] = {"mlp_only_layers": int, "layer_types": str}
_WORDS = ("rope_type", "type")
_ROPE_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_ROPE_NUMBERS += ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor")


def check_types(config: Mapping[str, Any]) -> None:
    """Raise InputError that lists every key whose value is of another type or out of all bounds. Null is as absent."""
    wrong = []
    for key, value in config.items():
        if value is not None and (expected := _expected(key, value)):
            wrong.append(f"{key} is {str(value)[:60]!r}, which is no {expected}")
    for name in _SECTIONS[:2]:
        wrong += [f"{name}.{text}" for text in _wrong_in_rope(config.get(name))]
    if wrong:
        raise InputError("; ".join(wrong))


def _expected(key: str, value: Any) -> str | None:
    """Return what a key's value should have been, or None when it is that."""
    if key in _WHOLE:
        least, most = _WHOLE[key]
        right = type(value) is int and least <= value <= most
        return None if right else f"whole number from {least} to {most}"
    if key in _POSITIVE:
        return None if _is_number(value) and value > 0 else "number above 0"
    if key in _NUMBERS:
        return None if _is_number(value) and value >= 0 else "number from 0 on"
    if key in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if key in _SECTIONS:
        return None if isinstance(value, dict) else "mapping"
    if key in _LISTS:
        right = isinstance(value, list) and all(type(item) is _LISTS[key] for item in value)
        return None if right else f"list of {_LISTS[key].__name__}"
    if key.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        return None if all(type(i) is int for i in ids) else "token id"
    return None


def _wrong_in_rope(section: Any) -> list[str]:
    """Return what is wrong in a rotary section: its values are numbers, except its kind and its switches."""
    if not isinstance(section, dict):
        return []
    found = []
    for key, value in section.items():
        if value is None or isinstance(value, dict):  # sections for each kind of layer are refused elsewhere
            continue
        if key in _WORDS and not isinstance(value, str):
            found.append(f"{key} is {value!r}, which is no word")
        elif key in _ROPE_NUMBERS and not (_is_number(value) and 0 < value < 1e18):
            found.append(f"{key} is {str(value)[:60]!r}, which is no number above 0")
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30 and value == value
