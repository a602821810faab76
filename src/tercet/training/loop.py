"""The loop: batches in, engine.step, record, evaluate, sample, checkpoint. Knows no machinery."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tercet.engine import Engine, MicroBatch, StepResult, Terms
from tercet.errors import InterruptedRun, TercetError
from tercet.parallel.world import World
from tercet.spec.mesh import ROWS, TOKENS
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.checkpoint import Checkpoints
from tercet.training.record import Recorder
from tercet.training.schedule import learning_rate


class Batches(Protocol):
    """What the loop needs of a loader: a pure function of the step, so its only state is a number."""

    def micro_batches(self, step: int, *, rank: int, ranks: int, micro_batch: int) -> Sequence[MicroBatch]: ...

    def evaluation(self, *, rank: int, ranks: int, micro_batch: int) -> Iterator[MicroBatch]: ...


@dataclass
class Progress:
    """Everything that a resumed run must know beside weights and moments; saved as state.json."""

    step: int = 0  # steps done, skipped ones included
    updates: int = 0  # steps that changed the weights
    tokens: int = 0  # trained tokens
    skipped_in_a_row: int = 0
    train_loss: float | None = None
    validation_loss: float | None = None  # of the newest evaluation
    validated_step: int = -1


class Loop:
    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        world: World,
        checkpoints: Checkpoints,
        record: Recorder | None,
        train: TrainSection,
        optim: OptimSection,
        *,
        total_steps: int,
        micro_batch: int,
        checkpoint_every: int,
        progress: Progress,
        stop_requested: Callable[[], bool],
        state: dict[str, Any],
        sample: Callable[[int], None] | None = None,
        has_validation: bool = True,
        at: Callable[[int, list[int]], None] = lambda step, rows: None,
        terms: Callable[[int], Terms | None] = lambda update: None,
    ):
        """`state` is added to every checkpoint's state.json; `at(step, rows)` notes where this rank is, for errors;
        `terms(update)` says what an update learns besides the main loss."""
        self.engine, self.batches, self.world = engine, batches, world
        self.checkpoints, self.record, self.train, self.optim = checkpoints, record, train, optim
        self.total_steps, self.micro_batch, self.checkpoint_every = total_steps, micro_batch, checkpoint_every
        self.progress, self.stop_requested, self.state = progress, stop_requested, state
        self.sample, self.has_validation, self.at, self.terms = sample, has_validation, at, terms

    def run(self) -> Progress:
        """Train until total_steps; raises InterruptedRun after saving when any rank was asked to stop."""
        p = self.progress
        while p.step < self.total_steps:
            # The one point per step where all ranks look whether any of them was asked to stop.
            if self.world.any(self.stop_requested()):
                self._save_and_stop()
            self._step()
            self.checkpoints.poll()
            last = p.step == self.total_steps
            if self.has_validation and (last or self._due(self.train.evaluate_every)):
                self._evaluate()
            if self.sample is not None and (last or self._due(self.train.sample_every)):
                self.sample(p.step)
            if last or self._due(self.checkpoint_every):
                self._save()
        self.checkpoints.finish()
        return p

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _micro_batches(self, step: int) -> Sequence[MicroBatch]:
        rank, ranks = self.world.data_rank, self.world.mesh.data_ranks
        return self.batches.micro_batches(step, rank=rank, ranks=ranks, micro_batch=self.micro_batch)

    def _step(self) -> None:
        p, begin = self.progress, time.perf_counter()
        batches = self._micro_batches(p.step)
        rows = [row for batch in batches for row in batch.rows if row >= 0]
        self.at(p.step + 1, rows)
        # The schedule follows updates: a skipped step does not move it.
        lr = learning_rate(self.optim, p.updates, self.total_steps)
        result = self.engine.step(batches, lr, self.terms(p.updates))
        p.step += 1
        if not result.updated:
            self._skip(result, rows)
            return
        p.updates += 1
        p.skipped_in_a_row = 0
        p.tokens += result.tokens
        p.train_loss = result.loss
        seconds = time.perf_counter() - begin
        if self.record is not None:
            self.record.step(
                p.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                tokens=result.tokens,
                seconds=seconds,
                tokens_per_second=result.tokens / seconds,
                **result.load,
            )
            if result.expert_counts and (p.step == self.total_steps or self._due(self.train.evaluate_every)):
                self.record.event("experts", step=p.step, counts=result.expert_counts)

    def _skip(self, result: StepResult, rows: list[int]) -> None:
        """A step that is not finite changed nothing on any rank. Find out whose it was, then skip or stop.

        Under fp16's dynamic loss scaling a finite loss whose scaled gradients overflow is how the scale is found:
        such steps are passed over, counted and shown, and stop the run only when there are too many in a row.
        """
        p, loss, norm = self.progress, result.loss, result.grad_norm
        p.skipped_in_a_row += 1
        overflow = result.loss_scale is not None and math.isfinite(loss)
        lost = [(rank, r) for rank, r in self.world.gather((self.world.rank, self._nonfinite_rows(rows)), ROWS) if r]
        where = "; ".join(f"rank {rank}, rows {', '.join(map(str, r))}" for rank, r in lost) or "the gradients"
        text = f"step {p.step}: loss {loss}, gradient norm {norm} (not finite: {where})"
        scale = {}
        if result.loss_scale is not None:
            text += f"; loss scale now {result.loss_scale:g}"
            scale = {"loss_scale": result.loss_scale}
        if self.record is not None:
            self.record.event("skip", step=p.step, loss=repr(loss), grad_norm=repr(norm), where=where, **scale)
            self.record.say(f"{text}; the step was skipped ({p.step - p.updates} so far)")
        if self.train.nonfinite == "stop" and not overflow:
            raise TercetError(
                f"{text}; stopped before the update",
                "Look at those rows; lower optim.lr; or set train.nonfinite=skip to pass over such steps.",
            )
        if p.skipped_in_a_row >= self.train.nonfinite_limit:
            raise TercetError(
                f"{text}; {p.skipped_in_a_row} steps in a row were skipped, the last that train.nonfinite_limit allows",
                "Weights born in bf16 often exceed fp16's range: use train.precision=bf16." if overflow else None,
            )

    def _nonfinite_rows(self, rows: list[int]) -> list[int]:
        """Return this rank's rows whose own loss is not finite (every rank computes equally many)."""
        found = []
        for batch in self._micro_batches(self.progress.step - 1):
            loss, _ = self.engine.evaluate(batch)
            if not math.isfinite(loss):
                found += [row for row in batch.rows if row >= 0]
        return found

    def _evaluate(self) -> None:
        """Mean loss over all validation tokens, each row once: sums, so no batch size or rank count shows."""
        p = self.progress
        sums = torch.zeros(2, dtype=torch.float64)
        rank, ranks = self.world.data_rank, self.world.mesh.data_ranks
        rows = self.batches.evaluation(rank=rank, ranks=ranks, micro_batch=self.micro_batch)
        for batch in rows:
            if self.world.any(self.stop_requested()):
                return  # the loop's next look saves and ends; this evaluation is not counted
            loss, tokens = self.engine.evaluate(batch)
            sums += torch.tensor([loss, tokens], dtype=torch.float64)
        self.world.sum(sums, TOKENS)
        if sums[1] == 0:
            return
        p.validation_loss, p.validated_step = (sums[0] / sums[1]).item(), p.step
        if self.record is not None:
            self.record.validation(p.step, p.validation_loss, int(sums[1]))

    def _save(self) -> None:
        p = self.progress
        state = {**self.state, **vars(p)}
        if p.validated_step != p.step:
            state["validation_loss"] = None  # belongs to other weights
        begin = time.perf_counter()
        self.checkpoints.save(self.engine, state)
        if self.record is not None:
            self.record.event("checkpoint", step=p.step, seconds=time.perf_counter() - begin)

    def _save_and_stop(self) -> None:
        p = self.progress
        if p.step == 0:
            raise InterruptedRun("stopped before the first step; there was nothing to save")
        self.checkpoints.finish()
        if self.checkpoints.last_step != p.step:  # one has just been completed: no second one
            self._save()
            self.checkpoints.finish()
        if self.record is not None:
            self.record.event("interrupted", step=p.step)
        raise InterruptedRun(f"stopped on request after step {p.step}; saved")


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: of the card, or on the CPU the process's resident peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
