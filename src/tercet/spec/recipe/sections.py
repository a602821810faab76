"""The sections of a recipe: model, adapter, data, strategy, optim, train, output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tercet.errors import nearest
from tercet.units import parse_count, parse_token_length


def _by(parse: Any) -> BeforeValidator:
    return BeforeValidator(lambda v: parse(v) if isinstance(v, str) else v)


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("", "none", "null", "~") else value


_LIST = BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
Count = Annotated[int, _by(parse_count)]
TokenLength = Annotated[int, _by(parse_token_length)]
Number = Annotated[float, BeforeValidator(lambda v: v.replace("_", "") if isinstance(v, str) else v)]
Auto = Literal["auto"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_sections(cls, value: Any) -> Any:
        """A section all of whose lines are commented out is not there: its defaults hold."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None or not cls._is_optional_section(k)}

    @classmethod
    def _is_optional_section(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        made_by = field.default_factory if field is not None else None
        return isinstance(made_by, type) and issubclass(made_by, Section)


# --------------------------------------------------------------------------------------------------- sections


class ModelSection(Section):
    """Which model. A bare word is a preset, a folder with config.json, a hub name or package:NAME/FILE."""

    preset: str | None = Field(
        default=None, description="name of a shipped preset; the base that the sizes below override"
    )
    path: str | None = Field(default=None, description="folder with config.json, hub name, or package:NAME/FILE")
    init: Literal["pretrained", "random"] | None = Field(
        default=None,
        description="start from stored weights or from random ones; default: pretrained when `path` is given",
    )
    module: Literal["tercet", "transformers"] = Field(
        default="tercet",
        description="whose module computes: tercet's own, or transformers' for an architecture that tercet has not "
        "(path with safetensors; single, ddp, zero1 to zero3 only)",
    )
    family: (
        Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek", "deepseek_v2", "deepseek_v3"] | None
    ) = Field(default=None, description="architecture of a model given by its sizes; default llama")
    layers: Annotated[Count, Field(ge=1, le=1000)] | None = None
    width: Annotated[Count, Field(ge=1)] | None = None
    heads: Annotated[Count, Field(ge=1)] | None = None
    kv_heads: Annotated[Count, Field(ge=1)] | None = None
    head_dim: Annotated[Count, Field(ge=2)] | None = None
    ffn: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="inner width of the feed-forward block")
    vocabulary: Annotated[Count, Field(ge=2)] | None = None
    context_tokens: Annotated[TokenLength, Field(ge=1)] | None = Field(
        default=None, description="longest context in tokens"
    )
    tied: bool | None = Field(default=None, description="the head shares the embedding's weights")
    rope_theta: Annotated[Number, Field(gt=0)] | None = None
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        description="{rope_type: linear, dynamic, llama3 or yarn, factor: …}, as Hugging Face configs have it",
    )
    q_rank: Annotated[Count, Field(ge=0)] | None = Field(
        default=None, description="latent attention: width of the queries' latent; 0: queries by one full matrix"
    )
    kv_rank: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="width of the keys' and values' latent"
    )
    nope_dim: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="part of each head without position"
    )
    rope_dim: Annotated[Count, Field(ge=2)] | None = Field(default=None, description="rotary part of each head")
    value_dim: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="size of each head's value")
    experts: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="routed experts per layer")
    experts_per_token: Annotated[Count, Field(ge=1)] | None = None
    shared_experts: Annotated[Count, Field(ge=0)] | None = Field(
        default=None, description="experts that every token visits"
    )
    expert_ffn: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="inner width of one expert")
    dense_layers: Annotated[Count, Field(ge=0)] | None = Field(default=None, description="first layers without experts")
    expert_groups: Annotated[Count, Field(ge=1)] | None = None
    groups_per_token: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="groups whose experts compete for a token"
    )
    expert_scale: Annotated[Number, Field(gt=0)] | None = Field(default=None, description="routed output times this")
    normalize_experts: bool | None = Field(
        default=None, description="a token's expert weights are divided by their sum"
    )
    mtp_depth: Annotated[Count, Field(ge=0, le=8)] | None = Field(
        default=None, description="further tokens predicted (V3)"
    )
    norm_eps: Annotated[Number, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return model_word(value)

    @property
    def pretrained(self) -> bool:
        """Whether the weights at step 0 are somebody's."""
        return self.path is not None and self.init != "random"

    @property
    def start(self) -> str:
        """What the weights are at step 0, in words: random (preset …) or pretrained from …."""
        if self.path is not None:
            return f"pretrained from {self.path}" if self.pretrained else f"random (in the shape of {self.path})"
        return f"random (preset {self.preset})" if self.preset else "random (sizes from the recipe)"


class AdapterSection(Section):
    """Low-rank matrices beside the frozen weights of model.path, through peft; the result is RUN/adapter."""

    kind: Literal["none", "lora"] = "none"
    rank: Annotated[Count, Field(ge=1)] = 16
    alpha: Annotated[Number, Field(gt=0)] = Field(default=32.0, description="B A counts alpha / rank times")
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    rslora: bool = Field(default=False, description="B A counts alpha / root of rank times (arXiv 2312.03732)")
    targets: Annotated[list[str] | str, Field(min_length=1)] = Field(
        default="all-linear",
        description="ends of names (q_proj), patterns (model.layers.[0-7].*_proj), or all-linear: every matrix of the "
        "layers but experts and router; one that matches nothing is an error",
    )
    modules_to_save: Annotated[list[str], _LIST] = Field(
        default_factory=list, description="trained whole beside the adapters: embed_tokens, lm_head, norms"
    )
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4: the layers' frozen matrices in 4 bits (QLoRA, through bitsandbytes)"
    )

    @model_validator(mode="after")
    def _kind(self) -> AdapterSection:
        # A resolved recipe says every key; what was meant as an adapter differs from what is said without one.
        fields = type(self).model_fields
        given = [
            k
            for k in self.model_fields_set - {"kind"}
            if getattr(self, k) != fields[k].get_default(call_default_factory=True)
        ]
        if not given and "kind" not in self.model_fields_set:
            given = list(self.model_fields_set)
        if given and self.kind == "none":
            raise ValueError(f"{', '.join(sorted(given))} given without an adapter: add kind: lora, or take it out")
        return self


class SourceSection(Section):
    path: str = Field(
        description="file, folder or glob; package:NAME/FILE for a file of an installed package; hub:OWNER/NAME, or "
        "hub:OWNER/NAME/CONFIGURATION, for a data set of the hub"
    )
    weight: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="share of the trained sequences, relative to the other sources; default: by size"
    )
    epochs: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="how often an epoch trains each row of this source, in place of weights; default 1"
    )
    format: Literal[
        "auto", "jsonl", "json", "csv", "text", "parquet", "arrow", "python",
        "messages", "sharegpt", "alpaca", "prompt", "preference",
    ] = Field(default="auto", description="of the file, or the layout of its rows where it holds chats")  # fmt: skip
    map: dict[str, str] = Field(
        default_factory=dict,
        description="our column name -> the file's, e.g. {text: content} or {prompt: question, completion: answer}",
    )


def _sources(value: Any) -> Any:
    if isinstance(value, (str, dict)):
        value = [value]
    if isinstance(value, list):
        return [{"path": v} if isinstance(v, str) else v for v in value]
    return value


def _validation(value: Any) -> Any:
    """A fraction, or sources. A text that reads as a number between 0 and 1 is a fraction."""
    value = _none_word(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return _sources(value)
    return _sources(value)


class DataSection(Section):
    train: Annotated[list[SourceSection], BeforeValidator(_sources), Field(min_length=1)]
    validation: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | list[SourceSection] | None, BeforeValidator(_validation)
    ] = Field(
        default=None, description="fraction of the documents held out (split by content hash), or sources of their own"
    )
    temperature: Annotated[Number, Field(gt=0, le=100)] = Field(
        default=1.0,
        description="over sources: each has the share of its sequences to the power of 1/temperature; above 1 favours "
        "small sources",
    )
    sequence_tokens: Annotated[TokenLength, Field(ge=2, le=2**20)] = 2048
    tokenizer: str = Field(
        default="model",
        description="model (the model's own), train (byte-level BPE on data.train), a file, folder or hub name; "
        "default: model, and train for a preset or sizes, which bring none",
    )
    stream: bool = Field(
        default=False,
        description="prepare data.train part by part while it is trained, for sets larger than memory or disk; needs "
        "train.steps",
    )
    bad_rows: Literal["stop", "skip"] = "stop"
    long_rows: Literal["drop", "cut", "split"] = Field(
        default="drop", description="rows longer than sequence_tokens; plain text files are always split"
    )
    template: str | None = Field(
        default=None,
        description="of chats: chatml, llama-3, deepseek-llm, deepseek-v3, qwen3, plain, or a .jinja file; "
        "default: the tokenizer's own",
    )
    train_on: Literal["assistant", "last", "all"] | None = Field(
        default=None,
        description="what of a chat is trained: every answer with its end (default), the last one, or all turns",
    )
    cache: str | None = Field(default=None, description="folder of prepared shards; default: the user's cache folder")


class OffloadSection(Section):
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    weights: Literal["none", "cpu", "nvme"] = "none"
    activations: Literal["none", "cpu"] = "none"
    nvme_path: str | None = Field(
        default=None, description="folder for what is on nvme, on each machine; default: swap/ in the run folder"
    )


WORDS: dict[str, dict[str, Any]] = {
    "auto": {},
    "single": {"zero": "0", "data": "1"},
    "ddp": {"zero": "0"},
    "zero1": {"zero": "1"},
    "zero2": {"zero": "2"},
    "zero3": {"zero": "3"},
    "host": {"engine": "host"},
    **{f"deepspeed-zero{n}": {"engine": "deepspeed", "zero": str(n)} for n in range(4)},
}
# What may follow a word, joined by "+": zero3+full+optimizer-cpu. The planner prints strategies in these words.
ADDED_WORDS: dict[str, tuple[str, str]] = {
    "once": ("reduce_gradients", "once_per_step"),
    "selective": ("recompute", "selective"),
    "full": ("recompute", "full"),
    **{f"every-{n}": ("recompute", f"every-{n}") for n in (2, 3, 4, 6, 8)},
    "compile": ("compile", "true"),
}
_ADDED = re.compile(r"(optimizer|weights|activations)-(cpu|nvme)|(tensor|pipeline|expert|context)-(\d+)")


class StrategySection(Section):
    """How the run is laid out. A bare word (auto, single, ddp, zero1, zero2, zero3, deepspeed-zero3, …) expands first;
    more may be added to it: zero3+full+optimizer-cpu."""

    engine: Literal["native", "deepspeed", "host"] = "native"
    zero: Annotated[int, Field(ge=0, le=3)] | Auto = Field(
        default="auto",
        description="0 replicates everything; 1 shards the optimizer, 2 the gradients too, 3 the weights too",
    )
    data: Annotated[Count, Field(ge=1)] | Auto = Field(
        default="auto", description="replicas: copies of the model, each with rows of its own"
    )
    tensor: Annotated[Count, Field(ge=1)] = 1
    pipeline: Annotated[Count, Field(ge=1)] = 1
    expert: Annotated[Count, Field(ge=1)] = 1
    context: Annotated[Count, Field(ge=1)] = 1
    micro_batch: Annotated[Count, Field(ge=1)] | Auto = "auto"
    recompute: Literal["none", "selective", "full", "every-2", "every-3", "every-4", "every-6", "every-8", "auto"] = (
        Field(
            default="auto",
            description="what backward computes again: nothing, all but matmuls and attention, all, or all of every n-th block",
        )
    )
    reduce_gradients: Literal["every_micro_batch", "once_per_step", "auto"] = Field(
        default="auto", description="zero 2 and 3: once_per_step saves communication and holds the gradients whole"
    )
    offload: OffloadSection = Field(default_factory=OffloadSection)
    compile: bool = False

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return strategy_word(value)


class OptimSection(Section):
    name: Literal["adamw", "adamw-8bit"] = Field(
        default="adamw", description="adamw-8bit holds the two moments in eight bits: 2 bytes a parameter instead of 8"
    )
    lr: Annotated[Number, Field(gt=0, le=10)] = 3e-4
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0, lt=1)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0, le=10)] = 0.1
    clip: Annotated[Number, Field(gt=0)] | Literal["none"] = Field(
        default=1.0, description="largest global gradient norm"
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: Annotated[Count, Field(ge=0)] = 0
    decay_steps: Annotated[Count, Field(ge=0)] | Auto = Field(
        default="auto", description="wsd: length of the decay at the end; auto is a fifth of the steps"
    )
    min_lr_ratio: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.0, description="the schedule ends at lr times this"
    )


class BalanceSection(Section):
    """How a mixture of experts is kept balanced; auto is what the model's family was trained with."""

    bias_speed: Annotated[Number, Field(ge=0)] | Auto = Field(
        default="auto", description="step of each expert's bias per optimizer step, without a loss (DeepSeek-V3: 0.001)"
    )
    bias_until: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="share of the steps after which the bias stands still (DeepSeek-V3: 14.3 T of 14.8 T tokens)",
    )
    sequence_loss: Annotated[Number, Field(ge=0)] | Auto = Field(
        default="auto", description="weight of the balance loss within each document (DeepSeek-V3: 0.0001)"
    )
    batch_loss: Annotated[Number, Field(ge=0)] | Auto = Field(
        default="auto", description="weight of the classic auxiliary loss over the tokens of a micro-batch"
    )


class PredictionSection(Section):
    """Weight of the multi-token prediction loss, as a share of the main loss (DeepSeek-V3's schedule)."""

    weight: Annotated[Number, Field(ge=0)] = 0.3
    late_weight: Annotated[Number, Field(ge=0)] = 0.1
    late_after: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.67,
        description="share of the steps after which late_weight counts (DeepSeek-V3: 10 T of 14.8 T tokens)",
    )


class TrainSection(Section):
    batch_sequences: Annotated[Count, Field(ge=1)] = Field(
        default=32, description="sequences per optimizer step over all ranks: the effective batch"
    )
    steps: Annotated[Count, Field(ge=1)] | None = None
    epochs: Annotated[Number, Field(gt=0)] | None = None
    precision: Literal["bf16", "fp32", "fp16", "fp8", "bf16-pure"] = "bf16"
    fp16_accumulation: bool = Field(
        default=False,
        description="cards also add matmuls up in fp16: up to twice as fast on GeForce; long sums are rounded and overflow",
    )
    seed: Annotated[Count, Field(ge=0, lt=2**32)] = 0
    freeze: Annotated[list[str], _LIST] = Field(
        default_factory=list,
        description="names or patterns of what is not trained: embed_tokens, lm_head, model.layers.[0-3].*",
    )
    evaluate_every: Annotated[Count, Field(ge=0)] = Field(default=0, description="steps; 0: only at the end")
    sample_every: Annotated[Count, Field(ge=0)] = Field(default=0, description="steps; 0: only at the end")
    sample_prompts: list[str] = Field(default_factory=list)
    sample_tokens: Annotated[Count, Field(ge=1)] = 48
    sample_temperature: Annotated[Number, Field(ge=0)] = Field(
        default=0.0, description="of sampled texts; 0 takes the most probable token each time"
    )
    balance: BalanceSection = Field(default_factory=BalanceSection)
    mtp: PredictionSection = Field(default_factory=PredictionSection)
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="what a step whose loss or gradient is not finite does"
    )
    nonfinite_limit: Annotated[Count, Field(ge=1)] = Field(
        default=8, description="skipped steps in a row that stop the run"
    )
    collective_timeout_seconds: Annotated[Number, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _length(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}: give one of the two")
        return self


class OutputSection(Section):
    folder: str | None = Field(default=None, description="default: runs/<recipe>-<n> under the working directory")
    checkpoint_every: Annotated[Count, Field(ge=0)] = Field(default=0, description="steps; 0: only at the end")
    keep: Annotated[Count, Field(ge=1)] = Field(default=2, description="checkpoints kept, besides the best")
    disk_full: Literal["wait", "stop"] = Field(default="wait", description="when a checkpoint finds no space")
    model_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="of RUN/model; default: by precision"
    )


class Recipe(Section):
    name: str = "recipe"
    model: ModelSection = Field(default_factory=ModelSection)
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    data: DataSection
    strategy: StrategySection = Field(default_factory=StrategySection)
    optim: OptimSection = Field(default_factory=OptimSection)
    train: TrainSection = Field(default_factory=TrainSection)
    output: OutputSection = Field(default_factory=OutputSection)

    @model_validator(mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(adapter := value.get("adapter"), str):
            value = {**value, "adapter": {"kind": adapter}}
        return _with_tokenizer(value)

    def to_yaml(self) -> str:
        """Return the resolved recipe: every key with the value in force."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _with_tokenizer(tree: Any) -> Any:
    """Return the tree with data.tokenizer=train where nobody chose one and the model, known by its sizes, has none."""
    model, data = (tree.get(key) for key in ("model", "data")) if isinstance(tree, dict) else (None, None)
    model = model_word(model if model is not None else {})
    if not isinstance(model, dict) or not isinstance(data, dict) or model.get("path") or "tokenizer" in data:
        return tree
    return {**tree, "data": {**data, "tokenizer": "train"}}


def model_word(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # What a word means is decided by its shape, not by what happens to lie on this disk, except that an
    # existing folder always wins: that is what somebody who types a folder's name means.
    if Path(value).expanduser().exists() or "/" in value or value.startswith((".", "package:")):
        return {"path": value}
    return {"preset": value}


def strategy_word(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    base, *added = value.split("+")
    if base not in WORDS:
        raise ValueError(f"{value!r} is not a strategy{nearest(base, WORDS)} (one of: {', '.join(WORDS)})")
    section = dict(WORDS[base])
    for word in added:
        if found := _ADDED.fullmatch(word):
            what, place, axis, ranks = found.groups()
            if what:
                section["offload"] = {**section.get("offload", {}), what: place}
            else:
                section[axis] = ranks
        elif word in ADDED_WORDS:
            key, setting = ADDED_WORDS[word]
            section[key] = setting
        else:
            raise ValueError(
                f"{value!r}: {word!r} is no addition to a strategy{nearest(word, ADDED_WORDS)} (one of: "
                f"{', '.join(ADDED_WORDS)}, optimizer-cpu, weights-cpu, optimizer-nvme, …)"
            )
    return section
