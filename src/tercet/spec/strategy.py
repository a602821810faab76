"""Strategy: how a run is laid out, resolved; and why_not: the sentences that refuse one.

The planner prunes by `why_not`, the trainer refuses by it: what cannot work is said once, here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from tercet.spec.mesh import Mesh
from tercet.spec.model import Model
from tercet.spec.recipe import Recipe, StrategySection, unbuilt

Recompute = Literal["none", "selective", "every-8", "every-6", "every-4", "every-3", "every-2", "full"]


@dataclass(frozen=True)
class Strategy:
    """A layout over `ranks` processes; `mesh` says which rank stands where."""

    engine: str = "native"
    zero: int = 0
    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    reduce_gradients: Literal["every_micro_batch", "once_per_step"] = "once_per_step"
    offload_optimizer: str = "none"
    offload_weights: str = "none"
    offload_activations: str = "none"
    compile: bool = False

    @property
    def name(self) -> str:
        """The strategy's word: single, ddp, zero1, zero2, zero3, host; with DeepSpeed its name before it."""
        if self.engine == "deepspeed":
            return f"deepspeed-zero{self.zero}"
        if self.engine == "host":
            return "host"
        if self.ranks == 1:
            return "single"
        return "ddp" if self.zero == 0 else f"zero{self.zero}"

    @property
    def word(self) -> str:
        """The whole layout but its micro-batch, as `strategy=` reads it back: zero3+full+optimizer-cpu."""
        words = [self.name]
        if self.engine == "native" and self.zero == 3 and self.reduce_gradients == "once_per_step":
            words.append("once")
        if self.recompute != "none" and self.engine != "host":  # which knows one way
            words.append(self.recompute)
        for what in ("optimizer", "weights", "activations"):
            if (place := getattr(self, f"offload_{what}")) != "none":
                words.append(f"{what}-{place}")
        words += [f"{a}-{n}" for a in ("tensor", "pipeline", "expert", "context") if (n := getattr(self, a)) > 1]
        return "+".join([*words, "compile"] if self.compile else words)

    @property
    def on_nvme(self) -> frozenset[str]:
        """What lives in files: optimizer (masters and moments), weights, or both."""
        places = {"optimizer": self.offload_optimizer, "weights": self.offload_weights}
        return frozenset(what for what, where in places.items() if where == "nvme")

    @property
    def mesh(self) -> Mesh:
        """The ranks as axes: those that pipeline, context and tensor leave are replicas under zero 0, shards else.

        With weights in host memory each rank updates its rows of every tensor: shards too.
        """
        rest = max(1, self.ranks // (self.pipeline * self.context * self.tensor))
        shards = bool(self.zero) or self.engine == "host"
        return Mesh(
            pipeline=self.pipeline,
            data=1 if shards else rest,
            shard=rest if shards else 1,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )

    def accumulation(self, batch_sequences: int) -> int:
        """Return the micro-batches per optimizer step: batch over data ranks times micro-batch, rounded up."""
        return ceil(batch_sequences / (self.mesh.data_ranks * self.micro_batch))

    def idle_rows(self, batch_sequences: int) -> int:
        """Return the padding rows of a step: computed, but weighing nothing."""
        return self.accumulation(batch_sequences) * self.mesh.data_ranks * self.micro_batch - batch_sequences

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Work:
    """What a step computes, whatever the layout: the part of the recipe that no strategy may change."""

    sequence_tokens: int
    batch_sequences: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    quantize: str = "none"  # the format of a frozen base under adapters
    fp16_accumulation: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Work:
        return cls(
            recipe.data.sequence_tokens,
            recipe.train.batch_sequences,
            recipe.train.precision,
            recipe.optim.name,
            recipe.adapter.quantize,
            recipe.train.fp16_accumulation,
        )


def not_built(recipe: Recipe) -> list[str]:
    """Return a sentence for everything the recipe asks for that does not exist yet."""
    s, why = recipe.strategy, list(unbuilt(recipe))
    deepspeed = s.engine == "deepspeed"
    if s.engine == "host" and (s.zero not in (0, "auto") or s.data not in (1, "auto")):
        why.append(
            "strategy.zero and strategy.data mean nothing to strategy=host: its weights are in host memory once, "
            "however many ranks there are; leave them out"
        )
    elif s.zero not in (0, "auto") and s.data not in (1, "auto"):
        why.append(
            f"strategy.data: {s.data} replicas of a model that zero {s.zero} cuts into shards are not built yet; leave "
            "strategy.data out and all ranks share one copy, or take strategy.zero=0 (ddp) for replicas"
        )
    for what in ("optimizer", "weights"):
        if getattr(s.offload, what) == "nvme" and not deepspeed:
            why.append(
                f"strategy.offload.{what}: nvme is built for strategy.engine=deepspeed (zero 3); cpu is for both"
            )
    if recipe.model.module == "transformers":
        why += _why_not_through_transformers(s)
    return why


def ranks_of(section: StrategySection, available: int) -> int:
    """Return the ranks that a section means where `available` can be started.

    `data` counts replicas. Copies that are whole (zero 0) fix the number of ranks; copies that are cut into shards
    take what is there.
    """
    if section.data == "auto" or section.zero not in (0, "auto"):
        return available
    return section.data * section.pipeline * section.context * section.tensor


def resolve(section: StrategySection, ranks: int, work: Work, micro_batch_tokens: int = 8192) -> Strategy:
    """Return the Strategy that a section means on `ranks` processes; fills what is `auto` without the planner.

    Micro-batch: as many rows as `micro_batch_tokens` holds, evened out so that the last one is not a remnant.
    """
    copies = section.zero == "auto" and section.data != "auto"  # whole, as many as asked for
    if copies or section.engine == "host":
        zero = 0
    elif section.engine == "deepspeed":  # its offload needs a stage on one rank too
        away = section.offload
        needs_3 = away.weights != "none" or away.optimizer == "nvme"
        zero = section.zero if section.zero != "auto" else 3 if needs_3 else 2
    else:
        zero = 0 if section.zero == "auto" or ranks == 1 else section.zero  # one rank has nothing to shard
    if section.micro_batch == "auto":
        data_ranks = max(1, ranks // (section.pipeline * section.context * section.tensor))
        rows = ceil(work.batch_sequences / data_ranks)
        cap = max(1, min(rows, micro_batch_tokens // work.sequence_tokens))
        micro = ceil(rows / ceil(rows / cap))
    else:
        micro = section.micro_batch
    # Without the planner nothing is recomputed unasked, but where the offload or the engine asks for it.
    asks = section.offload.activations != "none" or section.engine == "host"
    unasked: Recompute = "full" if asks else "none"
    recompute = unasked if section.recompute == "auto" else section.recompute
    reduce = section.reduce_gradients
    if reduce == "auto":
        reduce = "every_micro_batch" if zero >= 2 else "once_per_step"
    return Strategy(
        engine=section.engine,
        zero=zero,
        ranks=ranks,
        tensor=section.tensor,
        pipeline=section.pipeline,
        expert=section.expert,
        context=section.context,
        micro_batch=micro,
        recompute=recompute,
        reduce_gradients=reduce,
        offload_optimizer=section.offload.optimizer,
        offload_weights=section.offload.weights,
        offload_activations=section.offload.activations,
        compile=section.compile,
    )


def why_not(model: Model, strategy: Strategy, work: Work, machine: Any = None) -> list[str]:
    """Return one sentence per reason why this strategy cannot run; empty when it can."""
    why = _why_not_deepspeed(strategy, work, machine) if strategy.engine == "deepspeed" else []
    if strategy.engine == "host":
        why += _why_not_host(strategy)
    if (
        strategy.engine == "native"
        and strategy.offload_weights != "none"
        and (strategy.zero == 0 or strategy.ranks == 1)
    ):
        why.append(
            f"strategy.offload.weights: {strategy.offload_weights} needs weights that are sharded over several ranks "
            "(zero 1, 2 or 3); strategy.offload.optimizer=cpu works without"
        )
    why += _why_not_number_formats(model, strategy, work)
    if strategy.zero < 2 and strategy.reduce_gradients == "every_micro_batch" and strategy.ranks > 1:
        why.append(
            f"strategy.reduce_gradients: every_micro_batch needs sharded gradients (zero 2 or 3), not zero {strategy.zero}"
        )
    data_ranks = strategy.mesh.data_ranks
    fits = ceil(work.batch_sequences / data_ranks)  # places beyond the batch stay idle, as they do with accumulation
    if strategy.micro_batch > fits:
        why.append(
            f"{data_ranks} ranks times micro-batch {strategy.micro_batch} exceed train.batch_sequences "
            f"{work.batch_sequences}; the largest micro-batch is {fits}"
        )
    if work.sequence_tokens > model.context_tokens:
        why.append(
            f"data.sequence_tokens {work.sequence_tokens} exceeds the model's context of {model.context_tokens} tokens"
        )
    if strategy.compile and strategy.recompute == "selective":
        why.append(
            "strategy.compile: true with recompute selective: inside a compiled block no operator can be kept by name; use "
            "recompute none, full or every-n, or leave strategy.compile out"
        )
    if strategy.offload_activations != "none" and (strategy.recompute != "full" or strategy.engine != "native"):
        why.append(
            "strategy.offload.activations: cpu moves the blocks' inputs, which the native engine with recompute full keeps "
            "alone; add strategy.recompute=full"
        )
    if model.module != "tercet":
        why += _why_not_through_transformers(strategy)
    if model.trains_some:
        why += _why_not_frozen(model, strategy)
    return why


def _why_not_frozen(model: Model, strategy: Strategy) -> list[str]:
    """Return what a model that is partly frozen is not trained with."""
    what = f"adapter: {model.adapter.quantize if model.quantized else 'lora'}" if model.adapter else "train.freeze"
    why = []
    if strategy.engine != "native":
        why.append(f"{what} is not built for strategy.engine={strategy.engine}; the native engine has it")
    for kind in ("optimizer", "weights"):
        if (place := getattr(strategy, f"offload_{kind}")) != "none":
            why.append(
                f"{what} with strategy.offload.{kind}={place} is not built: gradients and states of what is trained "
                "are small; leave it out"
            )
    if model.quantized and strategy.compile:
        why.append(f"{what} with strategy.compile is not built; leave strategy.compile out")
    return why


def _why_not_number_formats(model: Model, strategy: Strategy, work: Work) -> list[str]:
    """Return what does not go together with moments in eight bits or weights without masters."""
    why = []
    if strategy.engine == "deepspeed" and work.optimizer == "adamw-8bit":
        why.append("optim.name: adamw-8bit is the native engine's; with strategy.engine=deepspeed use adamw")
    if work.precision == "bf16-pure" and strategy.engine == "deepspeed":
        why.append("train.precision: bf16-pure is the native engine's; with strategy.engine=deepspeed use bf16")
    elif work.precision == "bf16-pure" and (strategy.offload_optimizer, strategy.offload_weights) != ("none", "none"):
        why.append(
            "train.precision: bf16-pure has no master copies to offload: with strategy.offload, train.precision=bf16 takes "
            "no more of the card, and rounds nothing"
        )
    elif work.precision == "bf16-pure" and model.frozen:
        why.append(
            "train.precision: bf16-pure with an adapter saves nothing worth its rounding; use train.precision=bf16"
        )
    return why


def _why_not_through_transformers(strategy: Strategy | StrategySection) -> list[str]:
    """Return what a module that is not ours is not trained with: it is known by its tensors alone."""
    refused = {
        "engine": strategy.engine != "native",
        "compile": strategy.compile,
        "recompute": strategy.recompute not in ("none", "full", "auto"),
    }
    return [
        f"strategy.{key}: {str(getattr(strategy, key)).lower()} is not built for model.module=transformers; single, ddp "
        "and zero1 to zero3 of the native engine are, with recompute none or full"
        for key, wrong in refused.items()
        if wrong
    ]


def _why_not_host(strategy: Strategy) -> list[str]:
    """Return what weights in host memory are not trained with."""
    why = []
    if strategy.recompute != "full":
        why.append(
            f"strategy.recompute: {strategy.recompute} is not built for strategy=host, which computes each block again in "
            "backward; leave it out"
        )
    for what in ("optimizer", "weights", "activations"):
        if (place := getattr(strategy, f"offload_{what}")) != "none":
            why.append(f"strategy.offload.{what}: {place} beside strategy=host, where all of it lives in host memory")
    if strategy.compile:
        why.append("strategy.compile: true is not built for strategy=host; it is for native")
    return why


def _why_not_deepspeed(strategy: Strategy, work: Work, machine: Any) -> list[str]:
    """Return what DeepSpeed cannot do, or does in a way that breaks a promise of ours."""
    why = []
    if strategy.zero == 0 and work.precision != "fp32" and strategy.accumulation(work.batch_sequences) > 1:
        why.append(
            f"strategy.zero 0 with engine deepspeed adds the gradients of {strategy.accumulation(work.batch_sequences)} "
            f"micro-batches up in {work.precision}; use zero 1, strategy=ddp, or a larger micro-batch"
        )
    for what in ("optimizer", "weights"):
        where = getattr(strategy, f"offload_{what}")
        if strategy.zero == 0 and where != "none":
            why.append(f"strategy.offload.{what}: {where} needs a stage (strategy.zero 1, 2 or 3), and zero is 0")
    if strategy.offload_weights != "none" and strategy.zero in (1, 2):
        why.append(f"strategy.offload.weights: {strategy.offload_weights} needs zero 3, and zero is {strategy.zero}")
    if strategy.offload_optimizer == "nvme" and strategy.zero in (1, 2):
        why.append(f"strategy.offload.optimizer: nvme needs zero 3, and zero is {strategy.zero}; cpu works with less")
    if strategy.zero >= 2 and strategy.reduce_gradients == "once_per_step":
        why.append(
            f"strategy.reduce_gradients: once_per_step: DeepSpeed's stage {strategy.zero} reduces after every micro-batch"
        )
    if strategy.compile:
        why.append("strategy.compile: true is not built for engine deepspeed; it is for native")
    if work.precision == "fp16" and machine is not None and machine.card is None:
        why.append("train.precision: fp16: DeepSpeed has no fp16 on a CPU; use bf16 or fp32 here")
    return why


def nearest_batches(strategy: Strategy, batch_sequences: int) -> tuple[int, int]:
    """Return the largest batch below and the smallest above that leave no place idle (E09)."""
    unit = strategy.mesh.data_ranks * strategy.micro_batch
    return max(unit, batch_sequences // unit * unit), ceil(batch_sequences / unit) * unit
