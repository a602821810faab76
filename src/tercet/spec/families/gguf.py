"""GGUF files: the config that their metadata amounts to. Field names are those of the format's own definition.

Built for what is found in small real models: Llama and Mistral shapes, Qwen 2, Qwen 3, Qwen 3 MoE.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tercet.errors import InputError

KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}


@lru_cache(maxsize=1)  # reading the metadata takes seconds, and describing, loading and tokenising all need it
def _reader(path: str, modified: float) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError(f"{path}: reading GGUF needs the gguf package", "pip install 'tercet[gguf]'") from None
    try:
        return GGUFReader(path)
    except ValueError as error:
        raise InputError(f"{path} is not a GGUF file: {error}") from None


def reader(path: Path) -> Any:
    """Return the gguf package's reader of a file: memory-mapped, so tensors are read when asked for."""
    return _reader(str(path), path.stat().st_mtime)


def read_config(path: Path) -> dict[str, Any]:
    """Return a Hugging Face config for the model in a GGUF file. Raises InputError for what is not built."""
    file = reader(path)
    tensors = {t.name for t in file.tensors}

    def field(name: str, default: Any = None) -> Any:
        found = file.fields.get(name)
        value = default if found is None else found.contents()
        # Stored as fp32: 1e-5 comes back as 9.99999974e-06. Seven digits are what fp32 holds.
        return float(f"{value:.7g}") if isinstance(value, float) else value

    kind = field("general.architecture")
    if kind not in KINDS:
        raise InputError(f"{path}: GGUF architecture {kind!r} is not built", f"Built: {', '.join(KINDS)}.")
    if kind == "llama" and field("llama.expert_count"):
        raise InputError(f"{path}: a Mixtral mixture of experts is not built")

    def own(name: str, default: Any = None) -> Any:
        return field(f"{kind}.{name}", default)

    words = file.fields.get("tokenizer.ggml.tokens")
    config = {
        "model_type": KINDS[kind],
        "vocab_size": own("vocab_size") or (len(words.data) if words else None),
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv") or own("attention.head_count"),
        "head_dim": own("attention.key_length") or own("embedding_length") // own("attention.head_count"),
        "intermediate_size": own("feed_forward_length") or 3 * own("expert_feed_forward_length", 0),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": own("rope.freq_base", 10_000.0),
        "max_position_embeddings": own("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_scaling": _scaling(file, own, path),
        "dtype": "float32",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    # An answer ends at any of them; the first is what ends a text.
    ends = [config["eos_token_id"], *(field(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    if len(ends := list(dict.fromkeys(end for end in ends if end is not None))) > 1:
        config["eos_token_id"] = ends
    if field("tokenizer.ggml.add_bos_token", kind == "llama"):
        config["bos_token_id"] = field("tokenizer.ggml.bos_token_id")
    if kind == "qwen3moe":
        config |= {
            "num_experts": own("expert_count"),
            "num_experts_per_tok": own("expert_used_count"),
            "moe_intermediate_size": own("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return config


def _scaling(file: Any, own: Any, path: Path) -> dict[str, Any] | None:
    kind = own("rope.scaling.type")
    if kind in (None, "none"):
        if any(t.name == "rope_freqs.weight" for t in file.tensors):
            return _llama3(file, own, path)
        return None
    section = {"rope_type": kind, "factor": own("rope.scaling.factor")}
    if kind == "yarn":
        section["original_max_position_embeddings"] = own("rope.scaling.original_context_length")
    return section


def _llama3(file: Any, own: Any, path: Path) -> dict[str, Any]:
    """Return Llama 3's scaling: the file holds the divisor of each frequency, not the rule; the rule is checked."""
    stored = next(t.data for t in file.tensors if t.name == "rope_freqs.weight")
    theta, dim = own("rope.freq_base", 10_000.0), 2 * len(stored)
    low, high, trained = 1.0, 4.0, own("rope.scaling.original_context_length") or 8192
    factor = float(max(stored))
    for pair, divisor in enumerate(stored):
        wavelength = 2 * 3.141592653589793 * theta ** (2 * pair / dim)
        share = (trained / wavelength - low) / (high - low)
        expected = factor if share < 0 else 1.0 if share > 1 else 1 / ((1 - share) / factor + share)
        if abs(expected - divisor) > 0.01 * divisor:
            raise InputError(f"{path}: its table of rotary frequencies follows no rule that is built")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
