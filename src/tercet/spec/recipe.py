"""Recipe: what a user writes. Sections model, adapter, data, strategy, optim, train, output.

Read in this order: defaults, YAML file, `key=value` from the command line. Every scalar reaches pydantic as
text and is read by the declared type, so `1e-4`, `1_000`, `4k` and `24GB` mean the same in both places.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tercet.errors import InputError, nearest
from tercet.units import parse_count, parse_token_length


def _by(parse: Any) -> BeforeValidator:
    return BeforeValidator(lambda v: parse(v) if isinstance(v, str) else v)


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("", "none", "null", "~") else value


Count = Annotated[int, _by(parse_count)]
TokenLength = Annotated[int, _by(parse_token_length)]
Number = Annotated[float, BeforeValidator(lambda v: v.replace("_", "") if isinstance(v, str) else v)]
Auto = Literal["auto"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True)


# --------------------------------------------------------------------------------------------------- sections


class ModelSection(Section):
    """Which model. A bare word is a preset, a folder with config.json, a hub name or package:NAME/FILE."""

    preset: str | None = Field(default=None, description="name of a shipped preset; the base that the sizes below override")
    path: str | None = Field(default=None, description="folder with config.json, hub name, or package:NAME/FILE")
    init: Literal["pretrained", "random"] | None = Field(
        default=None, description="start from stored weights or from random ones; default: pretrained when `path` is given"
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
    context_tokens: Annotated[TokenLength, Field(ge=1)] | None = Field(default=None, description="longest context in tokens")
    tied: bool | None = Field(default=None, description="the head shares the embedding's weights")
    rope_theta: Annotated[Number, Field(gt=0)] | None = None
    rope_scaling: dict[str, Any] | None = Field(
        default=None, description="{rope_type: linear, dynamic, llama3 or yarn, factor: …}, as Hugging Face configs have it"
    )
    q_rank: Annotated[Count, Field(ge=0)] | None = Field(
        default=None, description="latent attention: width of the queries' latent; 0: queries by one full matrix"
    )
    kv_rank: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="width of the keys' and values' latent")
    nope_dim: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="part of each head without position")
    rope_dim: Annotated[Count, Field(ge=2)] | None = Field(default=None, description="rotary part of each head")
    value_dim: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="size of each head's value")
    experts: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="routed experts per layer")
    experts_per_token: Annotated[Count, Field(ge=1)] | None = None
    shared_experts: Annotated[Count, Field(ge=0)] | None = Field(default=None, description="experts that every token visits")
    expert_ffn: Annotated[Count, Field(ge=1)] | None = Field(default=None, description="inner width of one expert")
    dense_layers: Annotated[Count, Field(ge=0)] | None = Field(default=None, description="first layers without experts")
    expert_groups: Annotated[Count, Field(ge=1)] | None = None
    groups_per_token: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="groups whose experts compete for a token"
    )
    expert_scale: Annotated[Number, Field(gt=0)] | None = Field(default=None, description="routed output times this")
    normalize_experts: bool | None = Field(default=None, description="a token's expert weights are divided by their sum")
    mtp_depth: Annotated[Count, Field(ge=0, le=8)] | None = Field(default=None, description="further tokens predicted (V3)")
    norm_eps: Annotated[Number, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return _model_word(value)


class AdapterSection(Section):
    kind: Literal["none", "lora"] = "none"
    rank: Annotated[Count, Field(ge=1)] = 16
    alpha: Annotated[Number, Field(gt=0)] = 32.0
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | str = "all-linear"
    quantize: Literal["none", "nf4"] = "none"


class SourceSection(Section):
    path: str = Field(description="file, folder or glob; package:NAME/FILE for a file of an installed package")
    weight: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="share of the trained sequences, relative to the other sources; default: by size"
    )
    format: Literal["auto", "jsonl", "json", "text", "parquet", "python"] = "auto"
    map: dict[str, str] = Field(default_factory=dict, description="our column name -> the file's, e.g. {text: content}")


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
    ] = Field(default=None, description="fraction of the documents held out (split by content hash), or sources of their own")
    sequence_tokens: Annotated[TokenLength, Field(ge=2, le=2**20)] = 2048
    tokenizer: str = Field(
        default="model", description="model (the model's own), train (byte-level BPE on data.train), a file, folder or hub name"
    )
    bad_rows: Literal["stop", "skip"] = "stop"
    long_rows: Literal["drop", "cut", "split"] = Field(
        default="drop", description="rows longer than sequence_tokens; plain text files are always split"
    )
    template: str | None = None
    train_on: Literal["all", "assistant"] | None = None
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
}


class StrategySection(Section):
    """How the run is laid out. A bare word (auto, single, ddp, zero1, zero2, zero3, host) expands first."""

    engine: Literal["native", "deepspeed", "host"] = "native"
    zero: Annotated[int, Field(ge=0, le=3)] | Auto = Field(
        default="auto", description="0 replicates everything; 1 shards the optimizer, 2 the gradients too, 3 the weights too"
    )
    data: Annotated[Count, Field(ge=1)] | Auto = "auto"
    tensor: Annotated[Count, Field(ge=1)] = 1
    pipeline: Annotated[Count, Field(ge=1)] = 1
    expert: Annotated[Count, Field(ge=1)] = 1
    context: Annotated[Count, Field(ge=1)] = 1
    micro_batch: Annotated[Count, Field(ge=1)] | Auto = "auto"
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    reduce_gradients: Literal["every_micro_batch", "once_per_step", "auto"] = Field(
        default="auto", description="zero 2 and 3: once_per_step saves communication and holds the gradients whole"
    )
    offload: OffloadSection = Field(default_factory=OffloadSection)
    compile: bool = False

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return _strategy_word(value)


class OptimSection(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[Number, Field(gt=0, le=10)] = 3e-4
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0, lt=1)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0, le=10)] = 0.1
    clip: Annotated[Number, Field(gt=0)] | Literal["none"] = Field(default=1.0, description="largest global gradient norm")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: Annotated[Count, Field(ge=0)] = 0
    decay_steps: Annotated[Count, Field(ge=0)] | Auto = Field(
        default="auto", description="wsd: length of the decay at the end; auto is a fifth of the steps"
    )
    min_lr_ratio: Annotated[Number, Field(ge=0, le=1)] = Field(default=0.0, description="the schedule ends at lr times this")


class BalanceSection(Section):
    """How a mixture of experts is kept balanced; auto is what the model's family was trained with."""

    bias_speed: Annotated[Number, Field(ge=0)] | Auto = Field(
        default="auto", description="step of each expert's bias per optimizer step, without a loss (DeepSeek-V3: 0.001)"
    )
    bias_until: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=1.0, description="share of the steps after which the bias stands still (DeepSeek-V3: 14.3 T of 14.8 T tokens)"
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
        default=0.67, description="share of the steps after which late_weight counts (DeepSeek-V3: 10 T of 14.8 T tokens)"
    )


class TrainSection(Section):
    batch_sequences: Annotated[Count, Field(ge=1)] = Field(
        default=32, description="sequences per optimizer step over all ranks: the effective batch"
    )
    steps: Annotated[Count, Field(ge=1)] | None = None
    epochs: Annotated[Number, Field(gt=0)] | None = None
    precision: Literal["bf16", "fp32", "fp16", "fp8", "bf16-pure"] = "bf16"
    seed: Annotated[Count, Field(ge=0, lt=2**32)] = 0
    evaluate_every: Annotated[Count, Field(ge=0)] = Field(default=0, description="steps; 0: only at the end")
    sample_every: Annotated[Count, Field(ge=0)] = Field(default=0, description="steps; 0: only at the end")
    sample_prompts: list[str] = Field(default_factory=list)
    sample_tokens: Annotated[Count, Field(ge=1)] = 48
    balance: BalanceSection = Field(default_factory=BalanceSection)
    mtp: PredictionSection = Field(default_factory=PredictionSection)
    nonfinite: Literal["stop", "skip"] = Field(default="stop", description="what a step whose loss or gradient is not finite does")
    nonfinite_limit: Annotated[Count, Field(ge=1)] = Field(default=8, description="skipped steps in a row that stop the run")
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
    model_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(default=None, description="of RUN/model; default: by precision")


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
        return value

    def to_yaml(self) -> str:
        """Return the resolved recipe: every key with the value in force."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _model_word(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # What a word means is decided by its shape, not by what happens to lie on this disk, except that an
    # existing folder always wins: that is what somebody who types a folder's name means.
    if Path(value).expanduser().exists() or "/" in value or value.startswith((".", "package:")):
        return {"path": value}
    return {"preset": value}


def _strategy_word(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in WORDS:
        raise ValueError(f"{value!r} is not a strategy{nearest(value, WORDS)} (one of: {', '.join(WORDS)})")
    return WORDS[value]


# ---------------------------------------------------------------------------------------------------- loading


def shipped_recipes() -> dict[str, Path]:
    """Return name -> file of the recipes that come with the package."""
    folder = Path(str(resources.files("tercet") / "recipes"))
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one. Raises InputError with nearest names."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    if path.suffix in (".yaml", ".yml") or path.exists():
        raise InputError(f"recipe {str(name)!r} is not a file")
    raise InputError(
        f"no recipe {str(name)!r}{nearest(str(name), shipped)}",
        f"Give a YAML file or one of the shipped recipes: {', '.join(shipped)}.",
    )


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides.

    Raises InputError that names file and line (or the override), the value seen and what is allowed.
    """
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8", "Save the recipe as UTF-8.") from None
    tree, lines = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a recipe is a mapping of sections ({', '.join(_sections())})")
    tree.setdefault("name", path.stem)
    return build_recipe(tree, overrides, lines)


# One length of a run on the command line takes the place of the file's other one.
INSTEAD = {"train.steps": "train.epochs", "train.epochs": "train.steps"}


def build_recipe(tree: dict[str, Any], overrides: Iterable[str] = (), lines: dict[str, str] | None = None) -> Recipe:
    """Validate a plain tree of values. `lines` maps a dotted key to the "file, line n" it came from."""
    lines = dict(lines or {})
    overrides = list(overrides)
    given = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise InputError(f"{override!r} is not key=value", "For example: train.steps=100")
        key = key.strip()
        _set(tree, key, _override_value(value, override))
        lines[key] = f"{override!r} on the command line"
        if (other := INSTEAD.get(key)) and other not in given and isinstance(tree.get("train"), dict):
            tree["train"].pop(other.partition(".")[2], None)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise InputError("\n".join(_explain(error, lines))) from None


def read_yaml(text: str, name: str) -> tuple[Any, dict[str, str]]:
    """Return (values, dotted key -> "name, line n"); every scalar stays text. Raises InputError with the line."""
    lines: dict[str, str] = {}

    def value(node: yaml.Node, key: str) -> Any:
        lines[key] = f"{name}, line {node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for k, v in node.value:
                child = f"{key}.{k.value}" if key else str(k.value)
                if k.value in result:
                    raise InputError(f"{name}, line {k.start_mark.line + 1}: {child} is given twice")
                result[k.value] = value(v, child)
                lines[child] = f"{name}, line {k.start_mark.line + 1}"
            return result
        if isinstance(node, yaml.SequenceNode):
            return [value(v, f"{key}.{i}") for i, v in enumerate(node.value)]
        return None if node.tag.endswith(":null") else node.value

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise InputError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {error}") from None
    return ({} if node is None else value(node, "")), lines


def _override_value(text: str, override: str) -> Any:
    text = text.strip()
    if text.startswith(("[", "{")):  # lists and sections in YAML's flow form; anything else is taken as it stands
        return read_yaml(text, f"{override!r} on the command line")[0]
    return None if text in ("", "null") else text


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted key. A word in the way (strategy: zero2) becomes its section first."""
    *path, last = key.split(".")
    for depth, part in enumerate(path):
        child = tree.get(part)
        if depth == 0 and part == "strategy" and isinstance(child, str):
            child = dict(_strategy_word_or_input_error(child))
        elif depth == 0 and part == "model" and isinstance(child, str):
            child = dict(_model_word(child))
        elif depth == 0 and part == "adapter" and isinstance(child, str):
            child = {"kind": child}
        elif not isinstance(child, dict):
            child = {}
        tree[part] = child = dict(child)
        tree = child
    tree[last] = value


def _strategy_word_or_input_error(word: str) -> dict[str, Any]:
    try:
        return _strategy_word(word)
    except ValueError as error:
        raise InputError(f"strategy: {error}") from None


# ----------------------------------------------------------------------------------------------------- errors


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the Section class inside an annotation (Optional, list and Annotated looked through)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Annotated, Union, UnionType, list):
        for inner in get_args(annotation):
            if found := _section_of(inner):
                return found
    return None


@cache
def _all_keys() -> dict[str, list[str]]:
    """Return last part -> dotted keys, over the whole recipe."""
    found: dict[str, list[str]] = {}

    def walk(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            found.setdefault(name, []).append(prefix + name)
            inner = _section_of(field.annotation)
            if inner is not None and inner is not SourceSection:
                walk(inner, f"{prefix}{name}.")

    walk(Recipe, "")
    return found


def _sections() -> list[str]:
    return [n for n, f in Recipe.model_fields.items() if _section_of(f.annotation)]


def _explain(error: ValidationError, lines: dict[str, str]) -> list[str]:
    """Return one sentence per fault: where, key, value seen, what is allowed."""
    sentences: dict[str, str] = {}
    for fault in error.errors():
        # A union adds its branches' names to the path; only parts that are keys or indices belong to the user's key.
        parts = _key_parts(fault["loc"])
        key = ".".join(parts)
        where = _place(parts, lines)
        prefix = f"{where}: " if where else ""
        sentence = prefix + _sentence(fault, key, parts)
        if key not in sentences:
            sentences[key] = sentence
        elif fault["type"] not in ("extra_forbidden",) and sentence not in sentences[key]:
            # Branches of one union: say all that would be allowed, once.
            allowed = sentence.rpartition("; it ")[2]
            if "; it " in sentence and allowed not in sentences[key]:
                sentences[key] += f", or {allowed}"
    return list(sentences.values())


def _place(parts: list[str], lines: dict[str, str]) -> str:
    """Return where a key came from: its own place, that of something below it, or that of its section."""
    key = ".".join(parts)
    if key in lines:
        return lines[key]
    below = next((place for k, place in lines.items() if k.startswith(f"{key}.")), None)
    above = (lines[k] for k in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if k in lines)
    return below or next(above, "")


def _key_parts(location: tuple[str | int, ...]) -> list[str]:
    parts: list[str] = []
    section: type[Section] | None = Recipe
    for step in location:
        if isinstance(step, int):
            parts.append(str(step))
        elif section is not None and step in section.model_fields:
            parts.append(step)
            section = _section_of(section.model_fields[step].annotation)
        elif section is not None and not any(c in step for c in "[]()") and step not in _TYPE_NAMES and not step.startswith("constrained-"):
            parts.append(step)  # an unknown key
    return parts


_TYPE_NAMES = frozenset(("int", "float", "str", "bool", "list", "dict", "literal"))
_BOUNDS = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", "at least"),
           "less_than": ("lt", "<"), "less_than_equal": ("le", "at most")}  # fmt: skip


def _sentence(fault: Any, key: str, parts: list[str]) -> str:
    kind, value, context = fault["type"], fault.get("input"), fault.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(parts)
    if kind == "missing" or (value is None and kind.endswith("_type")):
        return f"{key} is missing"
    if kind in _BOUNDS:
        return f"{key} is {value}; it must be {_range(parts) or f'{_BOUNDS[kind][1]} {context[_BOUNDS[kind][0]]}'}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key} is {value!r}{nearest(str(value), choices)}; it must be one of {', '.join(choices)}"
    if kind == "value_error":
        return f"{key}: {context['error']!s}" if key else str(context["error"])
    what = {"int_parsing": "a whole number", "int_from_float": "a whole number", "int_type": "a whole number",
            "float_parsing": "a number", "float_type": "a number", "bool_parsing": "true or false",
            "bool_type": "true or false", "string_type": "a text", "list_type": "a text or a list",
            "too_short": "a list that is not empty"}.get(kind)  # fmt: skip
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        section = _section_of(Recipe.model_fields[parts[0]].annotation) if parts else Recipe
        names = ", ".join(section.model_fields) if section else ""
        return f"{key} is {value!r}; it must be a section with the keys {names}"
    return f"{key} is {value!r}; it must be {what}" if what else f"{key} is {value!r}: {fault['msg']}"


def _range(parts: list[str]) -> str:
    """Return the declared range of a key, as "at least 0 and less than 1"."""
    section: type[Section] | None = Recipe
    field = None
    for part in parts:
        if section is None or part not in section.model_fields:
            continue
        field = section.model_fields[part]
        section = _section_of(field.annotation)
    found: dict[str, Any] = {}

    def walk(item: Any) -> None:
        for bound in ("gt", "ge", "lt", "le"):
            if getattr(item, bound, None) is not None:
                found[bound] = getattr(item, bound)
        for inner in (*getattr(item, "metadata", ()), *(get_args(item) if get_origin(item) else ())):
            walk(inner)

    if field is not None:
        walk(field.annotation)
        for item in field.metadata:
            walk(item)
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[b]} {found[b]}" for b in ("gt", "ge", "lt", "le") if b in found)


def _unknown_key(parts: list[str]) -> str:
    """Return "unknown key optim.learning_rte; did you mean optim.lr?", looking in every section."""
    key, last, prefix = ".".join(parts), parts[-1], ".".join(parts[:-1])
    keys = _all_keys()
    aliases = {"learning_rate": "lr", "batch_size": "batch_sequences", "max_steps": "steps", "num_epochs": "epochs",
               "max_seq_length": "sequence_tokens", "cutoff_len": "sequence_tokens", "sequence_length": "sequence_tokens",
               "per_device_train_batch_size": "micro_batch", "gradient_checkpointing": "recompute",
               "max_grad_norm": "clip", "lr_scheduler_type": "schedule", "bf16": "precision", "fp16": "precision",
               "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads",
               "num_key_value_heads": "kv_heads", "intermediate_size": "ffn", "vocab_size": "vocabulary",
               "output_dir": "folder", "save_steps": "checkpoint_every", "eval_steps": "evaluate_every",
               "gradient_accumulation_steps": "batch_sequences", "num_train_epochs": "epochs"}  # fmt: skip
    from difflib import get_close_matches

    folded = last.replace("-", "_").lower()
    names = get_close_matches(folded, [*keys, *aliases], n=3, cutoff=0.6)
    found: list[str] = []
    for name in names:
        for full in keys.get(name, []) or keys.get(aliases.get(name, ""), []):
            if full not in found:
                found.append(full)
    # The user's own section first: that is where the slip most probably is.
    found.sort(key=lambda full: full.rpartition(".")[0] != prefix)
    proposal = f"; did you mean {', '.join(found[:3])}?" if found else ""
    return f"unknown key {key}{proposal}"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, for editors. Words stand where a section may be shortened."""
    schema = Recipe.model_json_schema()
    properties = schema["properties"]
    for name, words in (("strategy", {"enum": list(WORDS)}), ("model", {}), ("adapter", {"enum": ["none"]})):
        properties[name] = {"anyOf": [{"type": "string", **words}, properties[name]]}
    definitions = schema["$defs"]
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/SourceSection"}]}
    many = [*source["anyOf"], {"type": "array", "items": source}]
    data = definitions["DataSection"]["properties"]
    data["train"] = {"anyOf": many}
    data["validation"] = {"anyOf": [*many, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "null"}]}
    # A count may carry a unit (4k, 1_000), so wherever a number is wanted a text that reads as one is accepted.
    number_text = {"type": "string", "pattern": r"^[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?[kKmMgGbBtT]?i?[bB]?$"}

    def allow_units(node: Any) -> None:
        if isinstance(node, dict):
            for key, child in list(node.items()):
                if key == "properties":
                    for name, field in child.items():
                        if isinstance(field, dict) and field.get("type") in ("integer", "number"):
                            rest = {k: field.pop(k) for k in list(field) if k not in ("title", "description", "default")}
                            field["anyOf"] = [rest, number_text]
                        child[name] = field
                allow_units(child)
        elif isinstance(node, list):
            for child in node:
                allow_units(child)

    allow_units(schema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Tercet recipe"
    schema["required"] = ["data"]
    return schema
