"""What every engine does alike: counts of steps, terms and balance of experts, generation, what a load must find."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.engine import EngineSetup, MicroBatch, StepResult, Terms
from tercet.engine.schedules import loss_of
from tercet.engine.shards import Reader
from tercet.engine.sources import SourceSums
from tercet.errors import InputError
from tercet.model.balance import Balancer
from tercet.model.decode import generate
from tercet.parallel.mesh import lay_out
from tercet.spec.mesh import TOKENS
from tercet.spec.optimizers.adamw import MOMENTS, scale_of


class EngineBase:
    """An engine sets `module`, calls `_balance_experts` once it is built, and adds what is its own."""

    module: Any  # called like a Decoder
    balancer: Balancer
    config: dict[str, Any] | None = None  # what another library was told, as it was told
    reads_blocks = False  # whether it takes saved moments that are in eight bits

    def __init__(self, setup: EngineSetup):
        self.spec, self.strategy, self.seed = setup.spec, setup.strategy, setup.seed
        self.world = lay_out(setup.world, setup.strategy.mesh)
        self.steps_done = 0  # optimizer steps, skipped ones included; seeds the random numbers of a step
        self._updates = 0  # of these, the ones that changed the weights: AdamW's own count
        self._peak: dict[str, int] = {}
        self._vocabulary = setup.vocabulary or setup.spec.vocabulary
        self._stop_ids = tuple(setup.stop_ids)
        self._sources = SourceSums(setup.sources)

    # ------------------------------------------------------------------------------------------------ steps

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, float, Tensor]:
        """Return (the step's trained tokens on all ranks, the sum of their weights, that sum per source of several).

        By the sum a summed loss is divided; it is 1 where nothing is trained.
        """
        own = [sum(b.trained_tokens for b in micro_batches), sum(b.trained_weight for b in micro_batches)]
        each = self._sources.weights(micro_batches)
        sums = self.world.sum(torch.cat((torch.tensor(own, dtype=torch.float64), each)), TOKENS)
        tokens, weight = sums[:2].tolist()
        return int(tokens), weight or 1.0, sums[2:]

    def _set_terms(self, terms: Terms | None) -> Terms:
        """Tell the module what this step learns besides the main loss."""
        terms = terms or Terms(self.spec.balance, self.module.mtp_weight)
        self.module.balance, self.module.mtp_weight = terms.balance, terms.mtp_weight
        return terms

    def _balance_experts(self, weights: Any) -> None:
        """Take hold of the gates; their biases come from stored weights where there are any."""
        self.balancer = Balancer(self.module)
        if weights is not None:
            for name, bias in self.balancer.biases().items():
                bias.copy_(weights.tensor(name))

    def _rebalance(self, result: StepResult, terms: Terms) -> StepResult:
        """Move the experts' biases by the whole step's counts, once, after the optimizer; a skipped step by none."""
        if not self.balancer:
            return result
        if not result.updated:
            self.balancer.drop_counts()
            return result
        load = self.balancer.update(self.world.sum(self.balancer.counts(), TOKENS), terms.balance.bias_speed)
        figures = {"expert_load": load.worst, "idle_experts": load.idle, "expert_choices": load.choices}
        return replace(result, load=figures, expert_counts=load.counts.long().tolist())

    # ------------------------------------------------------------------------------------- evaluation, generation

    def _begin_evaluation(self) -> None:
        """Forwards without backward come; what they gather may stay until `_end_evaluation`."""

    def _end_evaluation(self) -> None:
        """Give up what evaluation gathered. Every verb but `evaluate` and `generate` calls it first."""

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, float]:
        self.module.eval()
        self._begin_evaluation()
        return loss_of(self.module, batch, self.world.device).item(), batch.trained_weight

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        self.module.eval()
        self._begin_evaluation()
        return [
            generate(
                self.module,
                len(self.spec.layers),
                prompt,
                n,
                vocabulary=self._vocabulary,
                device=self.world.device,
                stop=self._stop_ids,
                temperature=temperature,
                seed=seed,
                fixed_length=self.world.size > 1,
            )
            for prompt in prompts
        ]

    # ------------------------------------------------------------------------------------------------ saved state

    def _position(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "updates": self._updates}

    def _open_saved(self, folder: Path) -> Reader:
        """Return the reader of a save that holds exactly this model's state. Raises InputError for another's."""
        reader = Reader(folder)
        trained = [t for t in self.spec.tensors() if self.spec.trains(t)]
        in_blocks = {f"{scale_of(m)}/{t.name}" for m in MOMENTS for t in trained} & reader.keys()
        if in_blocks and not self.reads_blocks:
            raise InputError(
                f"{folder}: the moments are in eight bits, which only strategy.engine=native reads",
                "Resume with the native engine.",
            )
        wanted = {f"{what}/{t.name}" for t in trained for what in ("weights", *MOMENTS)}
        wanted |= {f"balance/{name}" for name, _ in self.balancer.state()}
        if (found := reader.keys() - in_blocks) != wanted:
            missing, extra = sorted(wanted - found), sorted(found - wanted)
            raise InputError(
                f"{folder}: the saved state does not match the model: missing {missing[:6]}, unexpected {extra[:6]}",
                "Resume with the recipe of that run.",
            )
        return reader

    def _restore_counts(self, reader: Reader) -> None:
        """Bring back the gates' state and the counts of steps."""
        for name, tensor in self.balancer.state():
            reader.read_into(f"balance/{name}", 0, tensor)
        self.steps_done, self._updates = reader.position["steps_done"], reader.position["updates"]

    # ------------------------------------------------------------------------------------------------ memory

    @abstractmethod
    def _held_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by ledger row."""

    def _note_peak(self, *rows: str) -> None:
        """Note what is held now, of these rows or of all."""
        if self.steps_done < 2:  # every step is alike
            for row, held in self._held_bytes().items():
                if not rows or row in rows:
                    self._peak[row] = max(held, self._peak.get(row, 0))

    def memory(self) -> dict[str, dict[str, int]]:
        self._end_evaluation()
        return {"between_steps": self._held_bytes(), "peak": dict(self._peak)}


def once_each(tensors: Iterable[Tensor], counted: set[int]) -> Iterator[int]:
    """Yield the bytes of each storage that is not in `counted` (data pointers) yet; views of one buffer count once."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            yield storage.nbytes()
