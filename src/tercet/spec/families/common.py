"""What the families share: reading a Hugging Face config with care, rotary settings, sizes that must fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tercet.errors import InputError
from tercet.spec.blocks.gqa import GQA
from tercet.spec.model import Model, Rope

Sizes = dict[str, Any]
Config = Mapping[str, Any]

# Rotary scaling: what each kind must have, and what it may have. `type` is the older name of rope_type.
ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")),
}


def rope_sizes(config: Config) -> Sizes:
    """Return rope_theta and rope_scaling of a config in the hub's style or in transformers 5's.

    Raises InputError for a scaling that no formula here covers.
    """
    section = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in section.values()):
        raise InputError("rope_parameters differ from layer to layer; one rotary embedding for all layers is built")
    theta = section.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if (part := section.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")) not in (
        None,
        1,
        1.0,
    ):
        raise InputError(f"partial_rotary_factor is {part}; rotation of a part of each head is not built")
    kind = section.pop("rope_type", None) or section.get("type") or "default"
    section.pop("type", None)
    section = {key: value for key, value in section.items() if value is not None}
    if kind in ("llama3", "yarn", "longrope"):
        # Phi-style configs put the trained length beside the section; there it has the last word.
        original = config.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
        section["original_max_position_embeddings"] = original or config.get("max_position_embeddings", 2048)
        if kind == "yarn" and "factor" not in section:
            section["factor"] = config["max_position_embeddings"] / section["original_max_position_embeddings"]
    scaling = {} if kind == "default" else {"rope_type": kind, **section}
    check_scaling(scaling)
    return {"rope_theta": theta, "rope_scaling": scaling}


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise InputError when a scaling section misses a key or holds one that is not understood."""
    kind = scaling.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise InputError(f"rope_type {kind!r} is not built; known: {', '.join(ROPE_KINDS)}")
    needed, optional = ROPE_KINDS[kind]
    if missing := [key for key in needed if key not in scaling]:
        raise InputError(f"rope scaling {kind!r} needs {', '.join(missing)}")
    known = {*needed, *optional, "rope_type", "original_max_position_embeddings"}
    # A kind ignores the settings of the others, as transformers does; a key that nobody knows may matter.
    known |= {key for pair in ROPE_KINDS.values() for part in pair for key in part} | {"finetuned"}
    if unknown := sorted(set(scaling) - known):
        raise InputError(f"rope scaling {kind!r} has keys that are not understood: {', '.join(unknown)}")


def build_rope(sizes: Sizes) -> Rope:
    """Return the Rope of plain sizes; texts from a recipe become numbers."""
    scaling = {key: _number(value) for key, value in (sizes.get("rope_scaling") or {}).items() if value is not None}
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    if scaling.get("rope_type") in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", sizes.get("context_tokens") or 2048)
    check_scaling(scaling)
    if scaling.get("rope_type") == "default":
        scaling = {}
    if scaling.get("rope_type") == "dynamic":
        # Dynamic scaling starts to act beyond the trained length, which is the context.
        scaling["original_max_position_embeddings"] = sizes.get("context_tokens") or 2048
    return Rope(theta=float(sizes.get("rope_theta") or 10_000.0), scaling=tuple(sorted(scaling.items())))


def _number(value: Any) -> Any:
    if isinstance(value, str):
        for read in (int, float):
            try:
                return read(value)
            except ValueError:
                continue
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def rope_to_hf(model: Model) -> dict[str, Any]:
    """Return both styles: rope_theta with rope_scaling (hub), and rope_parameters (transformers 5)."""
    scaling = dict(model.rope.scaling)
    if model.rope.kind == "dynamic":
        scaling.pop("original_max_position_embeddings", None)
    theta = int(model.rope.theta) if model.rope.theta == int(model.rope.theta) else model.rope.theta
    parameters = {"rope_type": "default", **scaling, "rope_theta": float(theta)}
    hub = {**scaling, "type": model.rope.kind} if scaling else None
    return {"rope_theta": float(theta), "rope_scaling": hub, "rope_parameters": parameters}


def shared_sizes(config: Config) -> Sizes:
    """Return the sizes that every family's config has under the same keys."""
    return {
        "vocabulary": config["vocab_size"],
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "ffn": config["intermediate_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "context_tokens": config.get("max_position_embeddings", 2048),
        "init_std": config.get("initializer_range", 0.02),
        **rope_sizes(config),
    }


def shared_to_hf(model: Model, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model.family,
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.layers),
        "hidden_act": "silu",
        "max_position_embeddings": model.context_tokens,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        **rope_to_hf(model),
    }


def refuse_unbuilt(config: Config, expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InputError when a key that changes the arithmetic has a value that is not built.

    expected: key -> values that are; a missing or null key is the first of them.
    """
    expected = {"hidden_act": ("silu", "swish"), "attention_dropout": (0, 0.0), **expected}
    wrong = [
        f"{key} is {config[key]!r}, built: {allowed[0]!r}"
        for key, allowed in expected.items()
        if config.get(key) is not None and config[key] not in allowed
    ]
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "fp8", "gguf"):
        wrong.append(f"quantization_config.quant_method is {method!r}, built: 'fp8' with block scales")
    if wrong:
        raise InputError("; ".join(wrong))


def build_gqa(sizes: Sizes, **options: Any) -> GQA:
    """Return grouped-query attention. Raises InputError with the nearest sizes that fit together."""
    width, heads = sizes["width"], sizes["heads"]
    kv_heads = sizes.get("kv_heads") or heads
    head_dim = sizes.get("head_dim")
    if head_dim is None:
        _check_heads(width, heads)
        head_dim = width // heads
    if head_dim % 2:
        raise InputError(f"model.head_dim is {head_dim}; rotary embedding needs an even number")
    if heads % kv_heads:
        valid = [k for k in range(1, heads + 1) if heads % k == 0]
        raise InputError(
            f"model.heads {heads} is not divisible by model.kv_heads {kv_heads}",
            f"Nearest numbers of key-value heads that divide it: {_nearest(valid, kv_heads)}.",
        )
    return GQA(heads, kv_heads, head_dim, **options)


def _check_heads(width: int, heads: int) -> None:
    """Raise InputError where a width is not cut into heads of one even size, with numbers of heads or widths that are."""
    if width % (2 * heads) == 0:
        return
    if width % heads:
        wrong = f"model.width {width} is not divisible by model.heads {heads}"
    else:
        wrong = (
            f"model.width {width} in model.heads {heads} makes heads of {width // heads}; rotary embedding needs an "
            "even size"
        )
    if valid := [h for h in range(1, width // 2 + 1) if width % (2 * h) == 0]:
        raise InputError(wrong, f"Nearest numbers of heads that do: {_nearest(valid, heads)}; or set model.head_dim.")
    below = width // (2 * heads) * 2 * heads
    widths = " or ".join(str(w) for w in (below, below + 2 * heads) if w)
    raise InputError(
        wrong,
        f"No number of heads cuts the odd width {width} into heads of an even size, which rotary embedding needs: take "
        f"a model.width of {widths}, or set model.head_dim.",
    )


def build_model(sizes: Sizes, name: str, family: str, **fields: Any) -> Model:
    """Return the Model around the layers that a family made."""
    return Model(
        family=family,
        name=name,
        vocabulary=sizes["vocabulary"],
        width=sizes["width"],
        tied=bool(sizes.get("tied", False)),
        norm_eps=sizes.get("norm_eps") or 1e-6,
        rope=build_rope(sizes),
        context_tokens=sizes.get("context_tokens") or 2048,
        init_std=sizes.get("init_std") or 0.02,
        **fields,
    )


# Sizes that a model of every family has.
SHARED_SIZES = frozenset(
    ("family", "layers", "width", "heads", "ffn", "vocabulary", "context_tokens", "tied", "norm_eps")
    + ("rope_theta", "rope_scaling")
)
GROUPED_SIZES = SHARED_SIZES | {"kv_heads", "head_dim"}


def need(sizes: Sizes, keys: Iterable[str], family: str) -> None:
    """Raise InputError that lists the sizes which a model of this family cannot do without."""
    if missing := [f"model.{key}" for key in keys if sizes.get(key) is None]:
        raise InputError(f"model: {', '.join(missing)} missing", f"A model of the family {family} needs them.")


def _nearest(valid: list[int], wanted: int) -> str:
    return ", ".join(map(str, sorted(sorted(valid, key=lambda v: abs(v - wanted))[:3])))
