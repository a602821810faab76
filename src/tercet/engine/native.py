"""The native engine: PyTorch, one process or many. Order of what is applied: compile -> recompute -> shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.engine import Culprit, EngineSetup, MicroBatch, StepResult, Terms
from tercet.engine.adamw import RowAdamW, fresh_state, restore_moment, saved_moments
from tercet.engine.base import EngineBase, once_each
from tercet.engine.culprit import GradientWatch, culprits, one_by_one
from tercet.engine.formats import Held, check_formats, held
from tercet.engine.optim import build_optimizer, scale_gradients, square_sum
from tercet.engine.scaling import LossScale
from tercet.engine.schedules import StepWork, schedule_of
from tercet.engine.seeds import seed_random_numbers
from tercet.engine.shards import Provider, Save, SavedFile, on_cards, restored, room_for_copies
from tercet.engine.sources import pairs
from tercet.model.adapter import adapt, named_parameters, plain_name
from tercet.model.build import fill_parameters, make_buffers
from tercet.model.decoder import Decoder, initial_tensor
from tercet.model.objective import RowLosses
from tercet.model.quantized import STORAGE, NF4Linear
from tercet.model.through_transformers import ThroughTransformers, check_documents
from tercet.parallel.data import Replicated, pinned
from tercet.parallel.layout import Layout
from tercet.parallel.offload import InputsOnHost
from tercet.parallel.precision import PRECISIONS
from tercet.parallel.recompute import recompute
from tercet.spec.families.through_transformers import TransformersModel
from tercet.spec.mesh import SAME_TOKENS
from tercet.spec.model import Tensor as Description
from tercet.spec.optimizers.adamw import MOMENTS, scale_of
from tercet.spec.placement import region
from tercet.spec.recompute import level_of
from tercet.spec.strategy import Strategy


class NativeEngine(EngineBase):
    """Implements tercet.engine.Engine for zero 0 to 3."""

    reads_blocks = True

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        self._clip = math.inf if setup.optim.clip == "none" else setup.optim.clip
        self._precision = PRECISIONS[setup.precision]
        self._inputs = InputsOnHost(self.world.device) if setup.strategy.offload_activations != "none" else None
        self._scaler = LossScale() if setup.precision == "fp16" else None
        self._schedule = schedule_of(setup.strategy)
        self._evaluating = False
        # Names of the further predictions' tensors begin so.
        self._further = tuple(prefix for prefix, _ in list(self.spec.blocks())[len(self.spec.layers) :])
        self.layout = self._build(setup.strategy, setup.weights)
        self.module = self.layout.module
        self._balance_experts(setup.weights)
        if isinstance(self.spec, TransformersModel):
            check_documents(self.module, self.spec, self.world.device)
            self.layout.end_evaluation()
        self.optimizer = build_optimizer(self.layout.parts, setup.optim, setup.seed)
        self._make_moments(in_blocks=setup.optim.name == "adamw-8bit")
        check_formats(setup.precision, "native", self._formats())

    def _make_moments(self, in_blocks: bool) -> None:
        """Make them now, not at the first step: what is held is then the same at every moment."""
        for part in self.layout.parts:
            self.optimizer.state[part.value] = fresh_state(part.value, in_blocks)

    # ------------------------------------------------------------------------------------------------ building

    def _build(self, strategy: Strategy, weights: Provider | None) -> Layout:
        """Build on meta, then allocate and fill piece by piece: a sharded model is never whole on one rank."""
        module = self._empty_module()
        kinds = {t.name: t for t in self.spec.tensors()}

        mesh = self.world.mesh
        sharded = mesh.shard > 1
        packing = {plain_name(f"{name}.weight"): m for name, m in module.named_modules() if isinstance(m, NF4Linear)}
        masters: dict[str, Tensor] | None = {} if strategy.offload_optimizer != "none" and not sharded else None

        def value_of(name: str) -> Tensor:
            t = kinds[name := plain_name(name)]
            trained = self.spec.trains(t)
            if linear := packing.get(name):
                return linear.pack(self._start(t, weights).to(self.world.device))
            # What is frozen is held in the format that computes, and nowhere else.
            kept = self._precision.kept if trained else self._precision.compute
            stored = weights if t.kind != "adapter" else None
            if stored is None or not sharded:
                start = self._start(t, stored)
                if masters is None or not trained:
                    return start.to(self.world.device, kept)
                # The card never holds the fp32 model, not even now: it gets what computes, tensor by tensor.
                masters[name] = pinned(start, self.world)
                return masters[name].to(self.world.device, self._precision.compute, copy=True)
            # Only the rows that this rank will keep are read. The rest of the whole tensor is cut off next and never
            # touched, and memory of the host that was never touched is not there.
            rows = region(t.shape[0], mesh.shard, mesh.position(self.world.rank)["shard"])
            value = torch.empty(t.shape, dtype=kept, device=self.world.device)
            if not trained and strategy.zero < 3:
                rows = region(t.shape[0], 1, 0)
            value[rows.slice] = stored.rows(name, rows.begin, rows.end)
            return value

        sharder = None
        if sharded:  # FSDP2 takes a second to import: only those pay it who shard
            from tercet.parallel.shard import Sharder

            sharder = Sharder(self.world, self._precision, strategy)
        for n, (prefix, layer) in enumerate(module.blocks()):
            fill_parameters(layer, prefix, value_of)
            if strategy.compile:
                _compile(layer)
            recompute(layer, level_of(strategy.recompute, n), self._inputs)
            if sharder is not None:
                sharder.shard(layer)
        fill_parameters(module, "", value_of)
        make_buffers(module, self.world.device)
        if sharder is not None:
            sharder.shard(module)
            from tercet.parallel.shard import Sharded

            return Sharded(module, self.spec, self.world, self._precision, strategy)
        return Replicated(module, self.spec, self.world, self._precision, masters)

    def _start(self, t: Description, weights: Provider | None) -> Tensor:
        """Return a whole tensor's start on the CPU: what the files say, or random."""
        if weights is not None:
            return weights.tensor(t.name)
        return initial_tensor(t.name, t.shape, t.kind, self.spec, self.seed)

    def _empty_module(self) -> Any:
        if isinstance(self.spec, TransformersModel):
            return ThroughTransformers(self.spec)
        with torch.device("meta"):
            module = Decoder(self.spec)
        if self.spec.trains_some:
            adapt(module, self.spec)
        return module

    def _formats(self) -> Iterator[Held]:
        """Yield what is held and in which format. Shards are the masters: what computes is gathered from them."""
        sharded = self.world.mesh.shard > 1 and self.strategy.engine == "native"
        for name, p in named_parameters(self.module):
            if p.requires_grad or p.dtype != STORAGE:  # packed bytes have the type that carries them
                wanted = self._precision.kept if sharded and p.requires_grad else self._precision.compute
                yield from held("weight", [(name, p.dtype)], wanted)
        for part in self.layout.parts:
            state = self.optimizer.state[part.value]
            yield from held("master", [(part.name, part.value.dtype)], self._precision.kept)
            yield from held(
                "moment", [(part.name, state[m].dtype) for m in MOMENTS if scale_of(m) not in state], torch.float32
            )
        yield from held("balance", [(name, t.dtype) for name, t in self.balancer.state()], torch.float32)

    # ------------------------------------------------------------------------------------------------ the verbs

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        terms: Terms | None = None,
        between: Callable[[], None] | None = None,
    ) -> StepResult:
        self._end_evaluation()
        tokens, weight, weights = self._count_tokens(micro_batches)
        terms, rows = self._set_terms(terms), self._sources.rows()
        loss_sum = self._run(micro_batches, weight, partial(self._begin_micro_batch, between), rows)
        self._note_peak()
        losses = torch.cat((loss_sum.cpu()[None], self._sources.losses(micro_batches, rows)))
        result = self._rebalance(
            self._update(losses, tokens, torch.cat((torch.tensor([weight], dtype=torch.float64), weights)), lr), terms
        )
        self.layout.end_step()
        self.steps_done += 1
        return result

    @property
    def _scale(self) -> float:
        return self._scaler.scale if self._scaler else 1.0

    def _begin_micro_batch(self, between: Callable[[], None] | None, micro_step: int) -> None:
        if between is not None:
            between()
        self._seed(self.steps_done, micro_step)

    def _seed(self, step: int, micro_step: int) -> None:
        seed_random_numbers(self.seed, step, self.world.data_rank, micro_step)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        weight: float,
        seed: Callable[[int], None],
        rows: RowLosses | None = None,
    ) -> Tensor:
        """Run forward and backward of a step; its gradients are then complete. Returns this rank's summed loss."""
        self.layout.begin_step()
        if self._inputs is not None:
            self._inputs.begin()
        self.module.train()
        work = StepWork(
            self.module,
            self.layout,
            micro_batches,
            weight,
            self.world.device,
            seed,
            self._note_peak,
            self._scale,
            rows,
        )
        loss_sum = self._schedule(work)
        self.layout.finish_gradients()
        return loss_sum

    def culprits(self, micro_batches: Sequence[MicroBatch]) -> list[Culprit]:
        self._end_evaluation()
        found = self._watched_run(micro_batches)
        alone = [row for batch in micro_batches for row in one_by_one(batch)]
        # Whose rows they are of a micro-batch of several: each runs by itself. With other random numbers and shapes
        # nothing may show then; what was found before stands.
        if len(alone) > len(micro_batches) and self.world.any(bool(found)):
            found = self._watched_run(alone) or found
        return found

    def _watched_run(self, micro_batches: Sequence[MicroBatch]) -> list[Culprit]:
        watch = GradientWatch(self.module)

        def begin(micro_batch: int) -> None:
            watch.micro_batch = micro_batch
            self._seed(self.steps_done - 1, micro_batch)

        with watch.looking():
            self._run(micro_batches, self._count_tokens(micro_batches)[1], begin)
        self.layout.end_step()
        self.balancer.drop_counts()
        return culprits(watch.found, micro_batches)

    def _update(self, losses: Tensor, tokens: int, weights: Tensor, lr: float) -> StepResult:
        """Clip and update if loss and norm are finite on every rank; decide from sums, so all decide alike.

        `losses`: this rank's summed loss, and that of each source of several; `weights`: the step's, in the same order.
        """
        parts = self.layout.parts
        if self.spec.mtp and self.module.mtp_weight == 0:
            self._freeze([p for p in parts if p.name.startswith(self._further)])
        squares = self._squares(parts)
        mesh, rank = self.world.mesh, self.world.rank
        # What several ranks hold alike, the first of them counts.
        own = losses if mesh.index(rank, SAME_TOKENS) == 0 else torch.zeros_like(losses)
        squares = squares if mesh.index(rank, self.layout.copied_along) == 0 else torch.zeros_like(squares)
        sums = self.world.sum(torch.cat((squares[None], own)))
        norm, loss = sums[0].sqrt().item() / self._scale, sums[1].item() / weights[0].item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._skipped(StepResult(loss, norm, tokens, updated=False))
        by_source = pairs(sums[2:], weights[1:])
        factor = (self._clip / (norm + 1e-6) if norm > self._clip else 1.0) / self._scale
        self._apply(factor, lr)
        self._updates += 1
        scale = self._scaler.after(False) if self._scaler else None
        return StepResult(loss, norm, tokens, loss_scale=scale, by_source=by_source)

    def _squares(self, parts: Sequence[Any]) -> Tensor:
        """Return the sum of squares of this rank's gradients, fp64 on the CPU."""
        return square_sum(parts) if parts else torch.zeros((), dtype=torch.float64)

    def _apply(self, factor: float, lr: float) -> None:
        """Scale the gradients, update the parts and bring them to where they compute."""
        parts = self.layout.parts
        if factor != 1.0:
            scale_gradients(parts, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if isinstance(self.optimizer, RowAdamW):
            self.optimizer.updates = self._updates
        self.optimizer.step()
        for part in parts:
            if part.value.grad is None:
                self.optimizer.state[part.value]["step"] += 1
        self.layout.after_update()

    def _skipped(self, result: StepResult) -> StepResult:
        """Say whose gradients were not finite, and take the scale down where they, not the loss, have overflowed."""
        found = tuple(
            p.name for p in self.layout.parts if p.value.grad is not None and not p.value.grad.isfinite().all()
        )
        scale = None
        if self._scaler:  # a loss that is not finite says nothing of the scale
            scale = self._scaler.after(True) if math.isfinite(result.loss) else self._scaler.scale
        return replace(result, overflowed=found, loss_scale=scale)

    def _freeze(self, parts: Sequence[Any]) -> None:
        """Leave these out of the coming update, decay included; AdamW's count goes on, as a resumed run's does."""
        for part in parts:
            part.value.grad = None

    def _begin_evaluation(self) -> None:
        if not self._evaluating:
            self._evaluating = True
            self.layout.begin_evaluation()

    def _end_evaluation(self) -> None:
        if self._evaluating:
            self._evaluating = False
            self.layout.end_evaluation()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self._end_evaluation()
        yield from self.layout.weights()
        yield from self.balancer.biases().items()

    # -------------------------------------------------------------------------------------------- saved state

    def _saved_rows(self) -> list[tuple[str, Tensor, int]]:
        """Return (key, rows, first row) that this rank writes: a replica writes its chunk, so each row is written once."""
        found = []
        mesh, axes = self.world.mesh, self.layout.copied_along
        for part in self.layout.parts:
            cut = region(part.region.rows, mesh.size(axes), mesh.index(self.world.rank, axes)).slice
            begin = part.region.begin + cut.start
            if cut.start == cut.stop:
                continue
            state = self.optimizer.state[part.value]
            found.append((f"weights/{part.name}", part.value[cut], begin))
            found += [(f"{what}/{part.name}", tensor[cut], begin) for what, tensor in saved_moments(state)]
        if self.world.rank == 0:  # equal on all ranks
            found += [(f"balance/{name}", tensor, 0) for name, tensor in self.balancer.state()]
        return found

    def _position(self) -> dict[str, Any]:
        return {**super()._position(), **(self._scaler.state() if self._scaler else {})}

    def save(self, folder: Path) -> Save:
        self._end_evaluation()
        rows = self._saved_rows()
        part = SavedFile(
            folder / f"rank-{self.world.rank}.safetensors",
            {key: tensor for key, tensor, _ in rows},
            {key.partition("/")[2]: begin for key, _, begin in rows},
        )
        # Where the parameters' state lies decides: the experts' biases are on the card whatever is offloaded.
        copies = sum(tensor.nbytes for tensor in part.tensors.values())
        background = on_cards(p.value for p in self.layout.parts) and room_for_copies(copies, self.world.size)
        return Save(lambda: [part], self._position(), background)

    @torch.no_grad()
    def load(self, folder: Path) -> list[str]:
        self._end_evaluation()
        reader = self._open_saved(folder)
        for part in self.layout.parts:
            reader.read_into(f"weights/{part.name}", part.region.begin, part.value)
            for moment in MOMENTS:
                restore_moment(self.optimizer.state[part.value], moment, reader, part)
        self._restore_counts(reader)
        if self._scaler:
            self._scaler.restore(reader.position)
        for part in self.layout.parts:
            self.optimizer.state[part.value]["step"].fill_(self._updates)
        self.layout.after_update()
        return restored(reader, "native")

    # ------------------------------------------------------------------------------------------------- memory

    def _held_bytes(self) -> dict[str, int]:
        rows = self.layout.held()
        rows.setdefault("optimizer", [])
        rows["states" if self.layout.on_host else "optimizer"] += [
            t for p in self.layout.parts for t in self.optimizer.state[p.value].values()
        ]
        if self._inputs is not None:
            rows.setdefault("pinned", []).extend(self._inputs.held())
        counted: set[int] = set()
        return {row: sum(once_each(tensors, counted)) for row, tensors in rows.items()}


def _compile(layer: Any) -> None:
    """Compile a block's forward, attention aside: document borders differ from batch to batch, and compiled in, each
    would be compiled anew. What recomputes and what shards lies outside, so both see one operation."""
    layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)
    layer.forward = torch.compile(layer.forward, dynamic=False)
