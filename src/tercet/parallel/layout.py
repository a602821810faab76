"""Layout: where a model's tensors lie and when they move. What the engines and schedules ask of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from tercet.parallel.parameter_shard import ParameterShard


class Inputs:
    """Inputs of blocks between forward and backward, by (block, micro-batch). Here they stay where they are."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def put(self, block: int, n: int, x: Tensor) -> None:
        self._inputs[block, n] = x

    def get(self, block: int, n: int) -> Tensor:
        """Return the input once; it is let go of here."""
        return self._inputs.pop((block, n))


class Layout(Protocol):
    """parallel/data.py (replicated) and parallel/shard.py (sharded) are layouts; so is what streams from the host.

    Verbs come in this order: a step is `begin_step`, for each micro-batch `begin_micro_batch`, around each block
    `fetch` and `release` where the schedule goes block by block, then `finish_gradients`, `after_update` if the step
    is taken, `end_step`. A layout for which there is nothing to do at a verb does nothing.
    """

    module: Any  # the model, called like a Decoder
    parts: Sequence[ParameterShard]  # what this rank updates
    on_host: bool  # whether masters and optimizer state live in host memory
    copied_along: tuple[str, ...]  # mesh axes along which ranks hold the same parts

    def begin_step(self) -> None:
        """Clear the gradients."""

    def begin_micro_batch(self, last: bool) -> None:
        """Say that backward of a micro-batch comes; after the last one's gradients are complete."""

    def fetch(self, block: int, backward: bool = False) -> None:
        """Have a block's weights on the device, complete, when what follows on the current stream runs.

        -1 is what lies before the blocks, and the number after the last block's what lies behind them, whose forward
        and backward come together. `backward`: gradients are added up until `release`.
        """

    def release(self, block: int, backward: bool = False) -> None:
        """Say that a block's weights are not needed until the next `fetch`; after `backward` its gradients may leave."""

    def inputs(self) -> Inputs:
        """Return where a step keeps the blocks' inputs between forward and backward."""
        return Inputs()

    def finish_gradients(self) -> None:
        """Return when each part's `value.grad` is the sum over micro-batches and ranks, fp32."""

    def after_update(self) -> None:
        """Bring the updated parts to where the next forward reads."""

    def end_step(self) -> None:
        """Give up what is not held between steps."""

    def begin_evaluation(self) -> None:
        """Say that forwards without backward come: what they gather may be kept until `end_evaluation`."""

    def end_evaluation(self) -> None:
        """Give up what evaluation gathered."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 parameter), one at a time; every rank must run through all of them. The frozen base of
        adapters is left out: it lies where it was read from.
        """
        ...

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank holds now, by ledger row."""
        ...
