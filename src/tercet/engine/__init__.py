"""The Engine: seven verbs between the loop and the machinery, and what a failed step is asked. Picks the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tercet.spec.model import Balance

if TYPE_CHECKING:
    from torch import Tensor

    from tercet.engine.shards import Provider
    from tercet.parallel.world import World
    from tercet.spec.model import Model
    from tercet.spec.recipe import OptimSection
    from tercet.spec.strategy import Strategy


class MicroBatch(Protocol):
    """Rows that are computed at once (data/loader.py's Batch): tensors of shape (rows, tokens) on the CPU."""

    input_ids: Tensor
    labels: Tensor  # shifted; -100 is not trained
    positions: Tensor
    documents: Tensor  # int32 borders over the flattened tokens; stays on the CPU
    rows: list[int]  # global sample numbers; -1 holds no row

    weights: Tensor | None  # of the labels in the loss; None: each counts once
    sources: list[int] | None  # the source of each row, -1 holds no row; None: there is one

    @property
    def trained_tokens(self) -> int: ...

    @property
    def trained_weight(self) -> float:
        """The sum of the trained labels' weights; without any their number."""
        ...

    def to(self, device: Any) -> MicroBatch: ...


@dataclass(frozen=True)
class Terms:
    """What a step learns besides the main loss; training/schedule.py makes one from the recipe and the step.

    balance: weights of the balance losses, and the step of the experts' biases. mtp_weight: share of the
    multi-token prediction loss. Both mean nothing to a model without experts or further predictions.
    """

    balance: Balance = field(default_factory=Balance)
    mtp_weight: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """`loss` is the mean over all trained tokens of the step on all ranks, by their weights; `grad_norm` that of the
    whole model. `tokens`: how many were trained.

    `by_source`: per source of a mix of several the summed loss over its trained tokens and the sum of their weights,
    over all ranks. `updated` is False when loss or norm was not finite: then nothing has changed on any rank. `load` says, for a
    mixture of experts, how full the experts were: expert_load (the fullest over the mean, worst layer),
    idle_experts, and expert_choices (trained tokens times experts per token times layers: none is dropped).
    """

    loss: float
    grad_norm: float
    tokens: int
    updated: bool = True
    load: dict[str, float] = field(default_factory=dict)
    expert_counts: list[list[int]] = field(default_factory=list)  # tokens sent to each expert, a list per layer
    loss_scale: float | None = None  # of fp16's dynamic loss scaling, after this step
    by_source: tuple[tuple[float, float], ...] = ()
    overflowed: tuple[str, ...] = ()  # parameters of this rank whose gradients were not finite, where that is known


@dataclass(frozen=True)
class Culprit:
    """A micro-batch of this rank whose gradients were not finite: `parameter` first in backward, `others` after it."""

    parameter: str
    others: int
    rows: list[int]


class SaveHandle(Protocol):
    """A save that may still be running. Every rank holds its own."""

    background: bool  # whether it goes on behind the next steps, from copies

    def done(self) -> bool: ...

    def wait(self) -> dict[str, Any]:
        """Return {file name: {"bytes", "blake2b"}} of what this rank wrote; raises what the writing raised."""
        ...

    def again(self) -> None:
        """Write the same state once more, after a full disk. Not in the background: only before the next step."""
        ...


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine is built from.

    `weights` is stored weights (engine/shards.py: Provider); None starts from random ones by `seed`. `vocabulary` is
    the tokenizer's size, `stop_ids` end a generated text. `batch_sequences`: the effective batch, which DeepSpeed
    wants to know beforehand. `sources`: how many the data is mixed of. `swap`: the folder for what the strategy keeps on nvme.
    """

    spec: Model
    strategy: Strategy
    optim: OptimSection
    precision: str
    world: World
    seed: int
    weights: Provider | None = None
    vocabulary: int | None = None
    stop_ids: Sequence[int] = ()
    batch_sequences: int = 1
    sources: int = 1
    swap: Path | None = None


class Engine(Protocol):
    @property
    def config(self) -> dict[str, Any] | None:
        """What another library was told to do, as it was told; None where there is none."""
        ...

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        terms: Terms | None = None,
        between: Callable[[], None] | None = None,
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches. All ranks call it with the same number of them.

        `between` is called where a micro-batch begins, equally often on all ranks. What it raises ends the step: weights
        and optimizer are then those of the step before and may be saved; nothing else may be asked of the engine.
        """
        ...

    def culprits(self, micro_batches: Sequence[MicroBatch]) -> list[Culprit]:
        """Run the step that was just not taken once more and return whose gradients were not finite on this rank.

        Changes nothing. All ranks call it, directly after that step, with the micro-batches it had.
        """
        ...

    def evaluate(self, batch: MicroBatch) -> tuple[float, float]:
        """Return (summed loss, what it is divided by) of this rank's batch: the trained tokens' weights, 1 each. Every rank calls it equally often."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Return up to n ids after each prompt; temperature 0 takes the most probable. Every rank calls it alike."""
        ...

    def save(self, folder: Path) -> SaveHandle:
        """Write this rank's part of weights and optimizer state, as they are now, into an existing folder.

        Involves no other rank; what fails in the writing is raised by the handle's wait().
        """
        ...

    def load(self, folder: Path) -> list[str]:
        """Restore weights and optimizer state from a complete checkpoint; return what was restored."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 tensor), one at a time. Every rank must run through all of them."""
        ...

    def memory(self) -> dict[str, dict[str, int]]:
        """Return {"between_steps" | "peak": {ledger row: bytes held by this rank}}, from the tensors themselves."""
        ...


def open_engine(setup: EngineSetup) -> Engine:
    """Return the engine that the strategy names, with weights in place."""
    if setup.strategy.engine == "deepspeed":
        from tercet.engine.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(setup)
    if setup.strategy.engine == "host":
        from tercet.engine.host import HostEngine

        return HostEngine(setup)
    from tercet.engine.native import NativeEngine

    return NativeEngine(setup)
