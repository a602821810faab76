"""A rehearsal: the native engine's own steps, at full size, on cards that are not there.

One process plays rank 0. Its cards hold shapes only; collectives travel nowhere, but take their bytes and time. Two
optimizer steps are run, the second of them counted, both with rows of full length, then an evaluation and the copies
of a save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.data.loader import Batch
from tercet.engine import Engine, EngineSetup, open_engine
from tercet.engine.shards import copied
from tercet.errors import NotLegalError
from tercet.parallel.jobs import Jobs
from tercet.parallel.world import World
from tercet.planner.clock import bus, rates
from tercet.planner.constants import COLLECTIVE_BYTES, CONTEXT_BYTES, Constants, load_for
from tercet.planner.host import host_rates
from tercet.planner.job import of_strategy
from tercet.rehearsal.cost import CardRates
from tercet.rehearsal.device import Counts, Device, Simulation
from tercet.rehearsal.host_work import HostWork
from tercet.rehearsal.install import cards
from tercet.rehearsal.recorder import BUCKETS, MemorySamples, busy, exposed, trace
from tercet.spec.machine import Machine
from tercet.spec.mesh import AXES
from tercet.spec.model import Model
from tercet.spec.recipe import Recipe
from tercet.spec.strategy import Strategy, Work
from tercet.spec.trained import trained_model


@dataclass(frozen=True)
class LoneWorld(World):
    """Rank 0 of several that are not there: what it would hear from the others is what it says itself."""

    host_work: HostWork | None = None

    @property
    def host(self) -> torch.device:
        return torch.device("meta")

    def jobs(self) -> Jobs:
        return self.host_work or Jobs()

    def partners(self) -> None:
        return None

    def sum(self, values: Tensor, over: tuple[str, ...] = AXES) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, value: Any, over: tuple[str, ...] = AXES) -> list[Any]:
        return [value] * self.mesh.size(over)


class Blank:
    """Stored weights without values, read row by row as an engine reads a folder's."""

    def __init__(self, model: Model):
        self._shapes = {t.name: t.shape for t in (*model.tensors(), *model.buffers())}

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return torch.empty((end - begin, *self._shapes[name][1:]), device="meta")


def rates_of(machine: Machine, strategy: Strategy, work: Work, constants: Constants) -> CardRates:
    """Return the machine's figures as the planner's clock knows them, at the rates that programs reach."""
    job = of_strategy(strategy, work)
    speed = rates(job, machine, constants)
    if speed is None or machine.card is None:
        raise NotLegalError(["a rehearsal needs cards whose figures are known"], "For example: --gpus 3x4090")
    half = speed.matmul
    return CardRates(
        flops={"bf16": half, "fp16": half, "fp32": half / 2 if work.precision != "fp32" else half},
        memory=speed.memory,
        to_card=speed.host or 12e9,
        to_host=speed.host or 12e9,
        peer=bus(job, machine, constants) or 8e9,
        launch=constants.launch_seconds,
    )


def batch_of(strategy: Strategy, work: Work, vocabulary: int, seed: int) -> Batch:
    """Return a micro-batch of rows of full length, each one document, all tokens trained."""
    rows, tokens = strategy.micro_batch, work.sequence_tokens
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(tokens).expand(rows, tokens).contiguous()
    return Batch(
        ids,
        ids.roll(-1, 1),
        positions,
        torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32),
        list(range(rows)),
    )


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose. `oom`, `lost`: from that operator on; `copy`: that copy over the host's link fails;
    `slow`: the card takes that many times as long."""

    oom: int | None = None
    lost: int | None = None
    copy: int | None = None
    slow: float = 1.0


def rehearse(
    recipe: Recipe, strategy: Strategy, machine: Machine, faults: Faults | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return (what two steps, an evaluation and a save did on the simulated card of rank 0, the counted step's trace).

    {"fits": bool, "out_of_memory": its message or None, "failed": another fault's message or None, "peak_bytes",
    "reserved_bytes", "outside_bytes": what context and NCCL take beside the allocator, "peak": …, "host": …,
    "step": …, "save": …, "timeline": …}; what was not reached is missing.
    The trace is in the Trace Event Format (rehearsal/recorder.py).
    """
    if strategy.engine not in ("native", "host"):
        raise NotLegalError([f"strategy.engine: {strategy.engine} cannot be rehearsed; native and host can"])
    model, work = trained_model(recipe), Work.of(recipe)
    faults = faults or Faults()
    figures = rates_of(machine, strategy, work, load_for(machine)).slowed(faults.slow)
    assert machine.card is not None
    outside = CONTEXT_BYTES + (COLLECTIVE_BYTES if strategy.ranks > 1 else 0)  # of the card, and not the allocator's
    simulated = Simulation(capacity_bytes=machine.card.usable_bytes - outside, rates=figures, shapes=True)
    simulated.ranks = strategy.ranks
    device = simulated.device
    host_work = HostWork(device.timeline, *host_rates(machine, load_for(machine), strategy.ranks))
    device.fail_at, device.lost_at, device.fail_copy = faults.oom, faults.lost, faults.copy
    found: dict[str, Any] = {"fits": True, "out_of_memory": None, "failed": None}
    traced = None
    with cards(simulated), _alone(strategy.ranks):
        try:
            traced = _play(recipe, strategy, work, model, simulated, found, host_work)
        except torch.OutOfMemoryError as error:
            found |= {"fits": False, "out_of_memory": str(error)}
        except RuntimeError as error:
            if faults == Faults():
                raise
            found["failed"] = str(error)
    return {**found, **_found(simulated), "outside_bytes": outside}, traced


class _alone:
    """A process group of `ranks` of which only this one is there."""

    def __init__(self, ranks: int):
        self._ranks = ranks

    def __enter__(self) -> None:
        if self._ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=0, world_size=self._ranks, store=FakeStore())

    def __exit__(self, *error: Any) -> None:
        if self._ranks > 1:
            dist.destroy_process_group()


def _play(
    recipe: Recipe,
    strategy: Strategy,
    work: Work,
    model: Model,
    simulated: Simulation,
    found: dict[str, Any],
    host_work: HostWork,
) -> dict[str, Any]:
    """Put into `found` what is known as it becomes known; return the counted step's trace."""
    device = simulated.device
    world = LoneWorld(0, strategy.ranks, 0, torch.device("card", 0), host_work=host_work)
    device.row = "weights"
    precision, seed = recipe.train.precision, recipe.train.seed
    engine = open_engine(EngineSetup(model, strategy, recipe.optim, precision, world, seed, weights=Blank(model)))
    _mark_phases(engine, device)
    _name_rows(engine, device)
    accumulation = strategy.accumulation(work.batch_sequences)
    batches = [batch_of(strategy, work, model.vocabulary, n) for n in range(accumulation)]
    engine.step(batches, recipe.optim.lr)
    begin, timeline = _now(device), device.timeline
    device.counts = Counts()
    device.recorder = recorder = MemorySamples(
        begin, begin / BUCKETS
    )  # a step takes about as long as what came before it
    timeline.record_spans = True
    engine.step(batches, recipe.optim.lr)
    end = _now(device)
    device.recorder, timeline.record_spans = None, False
    found["step"] = {
        "seconds": end - begin,
        "tokens_per_second": work.batch_sequences * work.sequence_tokens / (end - begin),
        "by_what_was_busy": exposed(timeline.spans, begin, end),
        **_counted(device),
    }
    names, samples = [lane.name for lane in timeline.lanes], recorder.samples()
    stretches = busy(timeline.spans, begin, (end - begin) / BUCKETS)
    found["timeline"] = {
        "seconds": end - begin,
        "memory": samples,
        "streams": [{"name": name, "busy": stretches.get(n, [])} for n, name in enumerate(names)],
    }
    traced = trace(timeline.spans, names, samples, begin)
    engine.evaluate(batches[0])
    found["save"] = _save(engine, device)
    return traced


def _save(engine: Engine, device: Device) -> dict[str, Any]:
    """Return what the copies of a save take: all of this rank's state, one tensor after another."""
    begin, device.counts = _now(device), Counts()
    rows = [tensor for _, tensor, _ in engine._saved_rows()]  # type: ignore[attr-defined]
    nbytes = sum(tensor.nbytes if tensor.is_meta else copied(tensor).nbytes for tensor in rows)  # the host's: no copy
    return {"bytes": nbytes, "copied_from_card_bytes": device.counts.bytes_to_host, "seconds": _now(device) - begin}


def _mark_phases(engine: Engine, device: Device) -> None:
    """What is allocated while the module runs forward are activations; what comes later, temporaries."""
    module = engine.module  # type: ignore[attr-defined]
    device.row = "temporaries"

    def begin(*_: Any) -> None:
        device.row = "activations"

    def end(*_: Any) -> None:
        device.row = "temporaries"

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def _name_rows(engine: Engine, device: Device) -> None:
    """Give what the engine holds between steps its ledger rows."""
    held = engine.layout.held()  # type: ignore[attr-defined]
    states = [t for state in engine.optimizer.state.values() for t in state.values()]  # type: ignore[attr-defined]
    for row, tensors in (*held.items(), ("optimizer", states)):
        for tensor in tensors:
            memory = getattr(tensor, "_memory", None)
            if memory is not None and memory.row != row:
                device.held[memory.row] -= memory.nbytes
                device.held[row] += memory.nbytes
                memory.row = row


def _now(device: Device) -> float:
    return max(device.timeline.host_seconds, *(lane.seconds for lane in device.timeline.lanes), 0.0)


def _counted(device: Device) -> dict[str, Any]:
    counts = device.counts
    return {
        "kernels": sum(counts.kernels.values()),
        "kernels_by_operator": dict(counts.kernels.most_common(12)),
        "host_waits": dict(counts.host_waits),
        "bytes_to_card": counts.bytes_to_card,
        "bytes_to_host": counts.bytes_to_host,
        "blocking_copies": counts.blocking_copies,
        "unpinned_copies": counts.unpinned_copies,
        "collectives": dict(counts.collectives),
        "collective_bytes": dict(counts.collective_bytes),
    }


def _found(simulated: Simulation) -> dict[str, Any]:
    allocator, peak = simulated.device.allocator, simulated.device.peak
    return {
        "capacity_bytes": allocator.capacity,
        "peak_bytes": allocator.peak_allocated,
        "reserved_bytes": allocator.peak_reserved,
        "peak": {"operator": peak.operator, "number": peak.number, "rows": peak.rows},
        "host": {"pinned_bytes": simulated.most_pinned_bytes},
    }
