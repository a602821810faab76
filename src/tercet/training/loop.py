"""The loop: batches in, engine.step, record, evaluate, sample, checkpoint. Knows no machinery."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from tercet.engine import Culprit, Engine, MicroBatch, StepResult, Terms
from tercet.engine.culprit import one_by_one
from tercet.errors import InterruptedRun, RunError, TercetError
from tercet.parallel.world import World, is_collective_failure
from tercet.spec.mesh import AXES, TOKENS
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.checkpoint import Checkpoints
from tercet.training.pace import LONG_STEP_SECONDS
from tercet.training.record import Recorder
from tercet.training.schedule import learning_rate

CULPRITS_SHOWN = 4  # of a step that was not finite; all ranks may have some


class _GivenUp(Exception):
    """A step was ended between its micro-batches."""


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
    sampled_step: int = -1


class Loop:
    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        world: World,
        checkpoints: Checkpoints | None,
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
        `terms(update)` says what an update learns besides the main loss. Without `checkpoints` nothing is saved."""
        self.engine, self.batches, self.world = engine, batches, world
        self.checkpoints, self.record, self.train, self.optim = checkpoints, record, train, optim
        self.total_steps, self.micro_batch, self.checkpoint_every = total_steps, micro_batch, checkpoint_every
        self.progress, self.stop_requested, self.state = progress, stop_requested, state
        self.sample, self.has_validation, self.at, self.terms = sample, has_validation, at, terms
        self._long = True  # whether steps take so long that a request to stop is looked for within them
        self._seconds = 0.0  # of this rank's last step
        self.failed: list[tuple[int, str]] = []  # (step, what went wrong without ending the run)

    def run(self) -> Progress:
        """Train until total_steps, save, then do what follows the last step. Raises InterruptedRun after saving when
        any rank was asked to stop; a later session then does the rest.
        """
        p = self.progress
        if p.step > 0:
            self._after_save()  # of the step that is resumed: a stop may have come in between
        while p.step < self.total_steps:
            self._agree()
            self._step()
            if p.step == self.total_steps or self._due(self.checkpoint_every):
                self._save()
            if p.step == self.total_steps:
                self._finish_save()
            self._after_save()
        self._agree()
        return p

    def _agree(self) -> None:
        """The one point per step where ranks compare what each knows by its own clock: stop? is the save written?"""
        writing = self.checkpoints is not None and self.checkpoints.writing()
        flags = [self.stop_requested(), writing, self._seconds >= LONG_STEP_SECONDS]
        stop, writing, long = self.world.sum(torch.tensor([int(flag) for flag in flags])).tolist()
        self._long = bool(long) or self._seconds == 0
        if not writing:
            self._finish_save()
        if stop:
            self._save_and_stop()

    def _after_save(self) -> None:
        """Evaluate and sample where that is due and not done yet. Failing at it costs no step: all is saved before."""
        p, last = self.progress, self.progress.step == self.total_steps
        if self.has_validation and p.validated_step != p.step and (last or self._due(self.train.evaluate_every)):
            self._without_harm("evaluation", self._evaluate)
        if self.sample is not None and p.sampled_step != p.step and (last or self._due(self.train.sample_every)):
            self._without_harm("samples", self._sample)

    def _without_harm(self, what: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do what training does not need; when it fails on any rank, say so, remember it in `failed` and go on.

        What it learned is added to the checkpoint only when all ranks have come through: their meetings stay in step.
        """
        problem, learned = None, {}
        try:
            learned = work()
        except Exception as error:
            if is_collective_failure(error):
                raise
            traceback.print_exc()  # into this rank's log
            text = error.message if isinstance(error, TercetError) else f"{type(error).__name__}: {error}"
            problem = f"rank {self.world.rank}: {text}"
        problems = [p for p in self.world.meet(problem) if p is not None]
        if problems:
            self.failed.append((self.progress.step, what))
            if self.record is not None:
                self.record.warn(f"step {self.progress.step}: {what} failed, training goes on: {problems[0]}")
        elif learned and self.checkpoints is not None:
            self.checkpoints.amend(self.progress.step, **learned)

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
        try:
            result = self.engine.step(batches, lr, self.terms(p.updates), self._give_up_when_asked)
        except _GivenUp:  # on all ranks; what it had done will be done again
            self._save_and_stop()
        p.step += 1
        self._seconds = time.perf_counter() - begin
        if not result.updated:
            self._skip(result, batches)
            return
        p.updates += 1
        p.skipped_in_a_row = 0
        p.tokens += result.tokens
        p.train_loss = result.loss
        seconds = self._seconds
        if self.record is not None:
            self.record.step(
                p.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                tokens=result.tokens,
                seconds=seconds,
                tokens_per_second=result.tokens / seconds,
                memory_bytes=peak_bytes(self.world.device),
                **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
                **_of_sources(result),
                **result.load,
            )
            if result.expert_counts and (p.step == self.total_steps or self._due(self.train.evaluate_every)):
                self.record.event("experts", step=p.step, counts=result.expert_counts)

    def _give_up_when_asked(self) -> None:
        """End a long step where a micro-batch begins, on all ranks, when any was asked to stop."""
        if self._long and self.world.any(self.stop_requested()):
            raise _GivenUp

    def _skip(self, result: StepResult, batches: Sequence[MicroBatch]) -> None:
        """A step that is not finite changed nothing on any rank. Find out whose it was, then skip or stop.

        Under fp16's dynamic loss scaling a finite loss whose scaled gradients overflow is how the scale is found:
        such steps are passed over, counted and shown, and stop the run only when there are too many in a row.
        """
        p, loss, norm = self.progress, result.loss, result.grad_norm
        p.skipped_in_a_row += 1
        overflow = result.loss_scale is not None and math.isfinite(loss)
        stop = self.train.nonfinite == "stop" and not overflow
        too_many = p.skipped_in_a_row >= self.train.nonfinite_limit
        # Which scale is found is no fault of anybody's: such a step is not computed again to find whose it was.
        where = "" if overflow and not too_many else self._culprits(loss, batches)
        where = where or self._gradients(result, batches)
        text = f"step {p.step}: loss {loss}, gradient norm {norm} (not finite: {where})"
        scale = {}
        if result.loss_scale is not None:
            text += f"; loss scale now {result.loss_scale:g}"
            scale = {"loss_scale": result.loss_scale}
        if self.record is not None:
            self.record.event("skip", step=p.step, loss=repr(loss), grad_norm=repr(norm), where=where, **scale)
            if not stop:
                self.record.say(f"{text}; the step was skipped ({p.step - p.updates} so far)")
        if stop or too_many:
            self._finish_save()  # one that is still being written, behind the steps, is whole before the run ends
        if stop:
            raise RunError(
                f"{text}; stopped before the update",
                "Look at what is named; lower optim.lr; or set train.nonfinite=skip to pass over such steps.",
            )
        if too_many:
            raise RunError(
                f"{text}; {p.skipped_in_a_row} steps in a row were skipped, the last that train.nonfinite_limit allows",
                "Weights born in bf16 often exceed fp16's range: use train.precision=bf16." if overflow else None,
            )

    def _gradients(self, result: StepResult, batches: Sequence[MicroBatch]) -> str:
        """Return which gradients were not finite when all were added up, and of which rows they are."""
        rows = [row for batch in batches for row in batch.rows if row >= 0]
        found = self.world.gather((result.overflowed, rows), AXES)
        names = list(dict.fromkeys(name for overflowed, _ in found for name in overflowed))
        if not names:
            return "the gradients"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        used = sorted({row for _, rows in found for row in rows})
        span = f"rows {', '.join(map(str, used[:16]))}" + (f" … {used[-1]}" if len(used) > 16 else "")
        return f"the gradients of {', '.join(names[:3])}{more}, from {span}"

    def _culprits(self, loss: float, batches: Sequence[MicroBatch]) -> str:
        """Return which ranks' rows have a loss, or else a gradient, that is not finite; "" when none has."""
        if not math.isfinite(loss):
            rows = self._nonfinite_rows(batches)
            mine = [f"rows {', '.join(map(str, rows))}"] if rows else []
        else:
            mine = [show_culprit(c) for c in self.engine.culprits(batches)]
        found = [f"rank {rank}, {what}" for rank, each in self.world.gather((self.world.rank, mine)) for what in each]
        more = f"; and {len(found) - CULPRITS_SHOWN} more" if len(found) > CULPRITS_SHOWN else ""
        return "; ".join(found[:CULPRITS_SHOWN]) + more

    def _nonfinite_rows(self, batches: Sequence[MicroBatch]) -> list[int]:
        """Return this rank's rows whose own loss is not finite."""
        alone = [row for batch in batches for row in one_by_one(batch)]
        lost = [row for row in alone if not math.isfinite(self.engine.evaluate(row)[0])]
        return [number for row in lost for number in row.rows if number >= 0]

    def _evaluate(self) -> dict[str, Any]:
        """Mean loss over all validation tokens, each row once: sums, so no batch size or rank count shows."""
        p = self.progress
        sums = torch.zeros(2, dtype=torch.float64)
        rank, ranks = self.world.data_rank, self.world.mesh.data_ranks
        rows: Iterator[MicroBatch] | None = None
        batch, error = None, None
        while True:  # equally often on every rank; all learn that one has failed before any computes with the others
            try:
                if rows is None:
                    rows = self.batches.evaluation(rank=rank, ranks=ranks, micro_batch=self.micro_batch)
                batch = next(rows, None)
            except Exception as found:
                error = error or found
            flags = [self.stop_requested(), error is not None, batch is not None]
            stop, failed, more = self.world.sum(torch.tensor([int(flag) for flag in flags])).tolist()
            if error is not None:
                raise error
            if stop or failed:
                return {}  # the loop's next look saves and ends; this evaluation is not counted
            if not more:
                break
            try:
                if batch is not None:
                    sums += torch.tensor(self.engine.evaluate(batch), dtype=torch.float64)
            except Exception as found:
                if is_collective_failure(found):
                    raise
                error = found
        self.world.sum(sums, TOKENS)
        if sums[1] == 0:
            return {}
        p.validation_loss, p.validated_step = (sums[0] / sums[1]).item(), p.step
        if self.record is not None:
            self.record.validation(p.step, p.validation_loss, int(sums[1]))
        return {"validation_loss": p.validation_loss, "validated_step": p.step}

    def _sample(self) -> dict[str, Any]:
        p = self.progress
        assert self.sample is not None
        p.sampled_step = p.step  # once, even when it fails
        self.sample(p.step)
        return {"sampled_step": p.step}

    def _finish_save(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        p = self.progress
        state = {**self.state, **vars(p)}
        if p.validated_step != p.step:
            state["validation_loss"] = None  # belongs to other weights
        self.checkpoints.save(self.engine, state)

    def _save_and_stop(self) -> NoReturn:
        p = self.progress
        if p.step == 0:
            raise InterruptedRun("stopped before the first step; there was nothing to save")
        if self.checkpoints is None:
            raise InterruptedRun(f"stopped on request after step {p.step}; this run saves nothing")
        self.checkpoints.finish()
        if self.checkpoints.last_step != p.step:  # one has just been completed: no second one
            self._save()
            self.checkpoints.finish()
        raise InterruptedRun(f"stopped on request after step {p.step}; saved")


def show_culprit(culprit: Culprit) -> str:
    more = f" and {culprit.others} more" if culprit.others else ""
    return f"rows {', '.join(map(str, culprit.rows))}: the gradient of {culprit.parameter}{more}"


def _of_sources(result: StepResult) -> dict[str, Any]:
    """Return what an event says of several sources: the mean loss of each, None where it had no row, and its weight."""
    if not result.by_source:
        return {}
    losses = [loss / weight if weight else None for loss, weight in result.by_source]
    return {"source_loss": losses, "source_weight": [weight for _, weight in result.by_source]}


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: of the card, or on the CPU the process's resident peak."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    # Where there is one, not getrusage's peak, which begins at that of the process that started this one.
    with contextlib.suppress(OSError):
        words = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").partition("VmHWM:")[2].split()
        if words:
            return int(words[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
