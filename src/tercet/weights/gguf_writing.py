"""A GGUF file of a model: metadata under the format's own names, tensors as llama.cpp lays them out.

Built for the families that are read (spec/families/gguf.py) and for byte-level BPE tokenizers whose rule for cutting
words llama.cpp has under a name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from tercet.errors import InputError
from tercet.spec.blocks.gqa import GQA
from tercet.spec.blocks.moe import MoE
from tercet.spec.blocks.swiglu import SwiGLU
from tercet.spec.families.gguf import KINDS
from tercet.spec.model import Model
from tercet.weights.gguf import half_split_rows

ARCHITECTURES = {**{family: kind for kind, family in KINDS.items()}, "mistral": "llama"}
_LLAMA_3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
    "\\s+(?!\\S)|\\s+"
)
# How a tokenizer cuts words before merging: llama.cpp's name for each rule.
CUTS = {
    "gpt-2": ["ByteLevel:True"],
    "smollm": ["Digits:True", "ByteLevel:True"],
    "llama-bpe": [f"Split:{_LLAMA_3}", "ByteLevel:False"],
    "qwen2": [f"Split:{_LLAMA_3.replace('{1,3}', '')}", "ByteLevel:False"],
}


def check_writable(spec: Model, backend: tokenizers.Tokenizer) -> str:
    """Return llama.cpp's name for the tokenizer's cutting of words. Raises InputError for what cannot be written."""
    if spec.family not in ARCHITECTURES:
        raise InputError(
            f"a GGUF file of the family {spec.family} is not built",
            f"Built: {', '.join(ARCHITECTURES)}; or --format hf.",
        )
    windows = {layer.attention.window for layer in spec.layers if isinstance(layer.attention, GQA)}
    if windows - {None}:
        raise InputError("a GGUF file of a model with sliding windows is not built", "Take --format hf.")
    if spec.rope.kind == "dynamic":
        raise InputError("GGUF has no dynamic rotary scaling", "Take --format hf.")
    if any(isinstance(la.feedforward, MoE) for la in spec.layers) and any(
        isinstance(la.feedforward, SwiGLU) for la in spec.layers
    ):
        raise InputError("a GGUF file of a model with both dense and sparse layers is not built", "Take --format hf.")
    return cut_name(backend)


def cut_name(backend: tokenizers.Tokenizer) -> str:
    """Return llama.cpp's name for how words are cut. Raises InputError for another tokenizer than byte-level BPE."""
    whole = json.loads(backend.to_str())
    normalizer = (whole.get("normalizer") or {}).get("type")
    if whole["model"]["type"] != "BPE" or normalizer not in (None, "NFC") or whole["model"].get("byte_fallback"):
        kind = f"{whole['model']['type']}, normaliser {normalizer}"
        raise InputError(f"a tokenizer of this kind ({kind}) is not written into GGUF files; byte-level BPE is")
    outer = whole.get("pre_tokenizer") or {}
    steps = [_step(s) for s in (outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer])]
    for name, cuts in CUTS.items():
        if steps == cuts:
            return name
    raise InputError(f"llama.cpp has no name for how this tokenizer cuts words: {', '.join(steps)[:300]}")


def _step(step: dict[str, Any]) -> str:
    kind = step.get("type")
    if kind == "Split":
        return f"Split:{step['pattern'].get('Regex')}"
    if kind == "Digits":
        return f"Digits:{step['individual_digits']}"
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return f"ByteLevel:{step.get('use_regex', True)}"
    return str(kind)


def write_gguf(
    path: Path,
    spec: Model,
    weights: Any,
    dtype: str,
    backend: tokenizers.Tokenizer,
    ids: dict[str, int | None],
    template: str | None,
    name: str,
) -> None:
    """Write the file. weights: `.tensor(name)` gives each parameter; dtype: fp32, fp16 or bf16, of the matrices.

    ids: bos, eos, pad, and eot and eom, at which an answer ends too; a bos that is None is not put in front by the runtime. Holds one tensor at a time beside the
    writer's temporary file.
    """
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURES[spec.family], use_temp_file=True)
    _write_sizes(writer, spec, name, dtype)
    _write_tokenizer(writer, spec, backend, ids, template)
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[spec.family])
    names = gguf.get_tensor_name_map(arch, len(spec.layers))
    for tensor in spec.tensors():
        for stored, value in _as_laid_out(spec, tensor.name, weights.tensor(tensor.name)):
            target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise InputError(f"llama.cpp has no name for {tensor.name}")
            _add(writer, target, value, dtype)
    if spec.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, spec: Model, name: str, dtype: str) -> None:
    import gguf

    attention, feedforward = spec.layers[0].attention, spec.layers[0].feedforward
    assert isinstance(attention, GQA)
    types = gguf.LlamaFileType
    kind = {"fp32": types.ALL_F32, "fp16": types.MOSTLY_F16, "bf16": types.MOSTLY_BF16}[dtype]
    writer.add_file_type(kind)
    writer.add_name(name)
    writer.add_vocab_size(spec.vocabulary)
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.width)
    writer.add_block_count(len(spec.layers))
    writer.add_feed_forward_length(feedforward.ffn)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    if isinstance(feedforward, MoE):
        writer.add_expert_count(feedforward.experts)
        writer.add_expert_used_count(feedforward.experts_per_token)
        writer.add_expert_feed_forward_length(feedforward.ffn)
    if spec.rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(spec.rope.kind))
        writer.add_rope_scaling_factor(float(spec.rope.get("factor") or 1.0))
    if original := spec.rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(int(original))


def _write_tokenizer(
    writer: Any, spec: Model, backend: tokenizers.Tokenizer, ids: dict[str, int | None], template: str | None
) -> None:
    from gguf import TokenType

    whole = json.loads(backend.to_str())
    added = {t["id"]: t for t in whole.get("added_tokens") or ()}
    by_id = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= spec.vocabulary:
        raise InputError(f"the tokenizer has {max(by_id) + 1} ids, the model {spec.vocabulary}")
    tokens, types = [], []
    for i in range(spec.vocabulary):  # rows of the embedding that no token has are named, so that sizes agree
        tokens.append(by_id.get(i, f"[PAD{i}]"))
        special = i in added and added[i]["special"]
        own = TokenType.NORMAL if i in by_id else TokenType.UNUSED
        types.append(TokenType.CONTROL if special else TokenType.USER_DEFINED if i in added else own)
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut_name(backend))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
        ("eot", writer.add_eot_token_id),
        ("eom", writer.add_eom_token_id),
    ):
        if ids.get(name) is not None:
            add(ids[name])
    writer.add_add_bos_token(ids.get("bos") is not None)
    if template:
        writer.add_chat_template(template)


def _as_laid_out(spec: Model, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Return (name as gguf's table knows it, tensor): experts' gate and up apart, Llama's head rows reordered."""
    if name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
        return [(f"{stem}gate_proj.weight", value[:, :half]), (f"{stem}up_proj.weight", value[:, half:])]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", value)]
    attention = spec.layers[0].attention
    if ARCHITECTURES[spec.family] == "llama" and isinstance(attention, GQA):
        heads = {"q_proj": attention.heads, "k_proj": attention.kv_heads}.get(name.split(".")[-2])
        if heads:
            rows = np.argsort(half_split_rows(len(value), heads))
            return [(name, value[torch.from_numpy(rows)])]
    return [(name, value)]


def _add(writer: Any, name: str, value: Tensor, dtype: str) -> None:
    import gguf

    value = value.contiguous()
    if value.dim() == 1 or dtype == "fp32" or "ffn_gate_inp" in name:  # as llama.cpp keeps norms, biases and routers
        writer.add_tensor(name, value.float().numpy())
    elif dtype == "fp16":
        writer.add_tensor(name, value.to(torch.float16).numpy())
    else:
        raw = value.to(torch.bfloat16).view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _llama3_divisors(spec: Model) -> np.ndarray:
    """Return what each frequency is divided by (Llama 3.1's rule), which llama.cpp stores instead of the rule."""
    attention = spec.layers[0].attention
    assert isinstance(attention, GQA)
    get = spec.rope.get
    low, high, factor = (float(get(k)) for k in ("low_freq_factor", "high_freq_factor", "factor"))  # type: ignore[arg-type]
    trained = float(get("original_max_position_embeddings"))  # type: ignore[arg-type]
    found = []
    for pair in range(attention.head_dim // 2):
        wavelength = 2 * math.pi * spec.rope.theta ** (2 * pair / attention.head_dim)
        share = (trained / wavelength - low) / (high - low)
        found.append(factor if share < 0 else 1.0 if share > 1 else 1 / ((1 - share) / factor + share))
    return np.array(found, dtype=np.float32)
