"""The DeepSpeed engine: ZeRO stages 0 to 3 and their offload, behind the same seven verbs as the native engine.

The model is our Decoder and starts from the same tensors; DeepSpeed gets its JSON (deepspeed_config.py), shards,
reduces and updates. What stays ours: the loss rule, the learning rate, random numbers, checkpoints.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.engine import Culprit, EngineSetup, MicroBatch, StepResult, Terms
from tercet.engine.base import EngineBase, once_each
from tercet.engine.culprit import GradientWatch, culprits
from tercet.engine.deepspeed.async_io import load_libraries
from tercet.engine.deepspeed.config import deepspeed_config
from tercet.engine.deepspeed.installed import require_deepspeed
from tercet.engine.deepspeed.state import Fragments, restore_scaler, scaler_state
from tercet.engine.deepspeed.zero_init import zero_init
from tercet.engine.formats import Held, check_formats, held
from tercet.engine.optim import UNDECAYED
from tercet.engine.schedules import loss_of
from tercet.engine.seeds import seed_random_numbers
from tercet.engine.shards import Provider, Save, SavedFile, on_cards, restored, room_for_copies
from tercet.engine.sources import pairs
from tercet.errors import NotLegalError
from tercet.model.build import make_buffers
from tercet.model.decoder import Decoder, initial_tensor
from tercet.parallel.recompute import recompute
from tercet.parallel.world import World
from tercet.spec.mesh import TOKENS
from tercet.spec.optimizers.adamw import MOMENTS
from tercet.spec.recipe import OptimSection
from tercet.spec.recompute import level_of

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedEngine(EngineBase):
    """Implements tercet.engine.Engine. `config` is DeepSpeed's JSON as it was used."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        strategy, optim, precision, weights = setup.strategy, setup.optim, setup.precision, setup.weights
        on_card = self.world.device.type == "cuda"
        if precision == "fp16" and not on_card:
            raise NotLegalError(["train.precision: fp16: DeepSpeed has no fp16 on a CPU; use bf16 or fp32 here"])
        self._compute = COMPUTE[precision]
        self._accumulation = strategy.accumulation(setup.batch_sequences)
        self._descriptions = {t.name: t for t in self.spec.tensors()}
        self.config = deepspeed_config(
            self.spec, strategy, optim, precision, setup.batch_sequences, on_card=on_card, swap=setup.swap
        )
        ds = import_deepspeed()
        if strategy.on_nvme:
            load_libraries()
        _join(self.world, ds)
        with _quiet(), _uncompiled():
            self.module = self._build(ds, weights)
            self.engine = self._initialize(ds, optim)
        self._names = {p: name for name, p in self.module.named_parameters()}
        if strategy.zero in (1, 2):  # their buckets exist only in backward, which comes to the first weight last
            next(iter(self._names)).register_post_accumulate_grad_hook(lambda _: self._note_peak("buffers"))
        self.fragments = Fragments(
            self.engine, self._names, strategy.zero, self.world.data_rank, self.world.mesh.data_ranks
        )
        check_formats(precision, "deepspeed", self._formats())
        if self._compute != torch.float32:
            # DeepSpeed makes its fp32 masters from the rounded weights; ours begin unrounded under every engine.
            self._fill_masters(lambda name: self._start(name, weights))
        self._balance_experts(weights)

    # ------------------------------------------------------------------------------------------------ building

    def _start(self, name: str, weights: Provider | None) -> Tensor:
        """Return a parameter's fp32 start, on the CPU."""
        t = self._descriptions[name]
        if weights is None:
            return initial_tensor(t.name, t.shape, t.kind, self.spec, self.seed)
        return weights.tensor(name).to(torch.float32)

    def _build(self, ds: Any, weights: Provider | None) -> Decoder:
        """Build on meta and fill piece by piece; under stage 3 each piece is sharded before the next is filled."""
        with torch.device("meta"):
            module = Decoder(self.spec)
        files = None  # what reads and writes weights on nvme: one for all, each new one would empty the folder

        def fill(piece: nn.Module, prefix: str) -> None:
            nonlocal files
            for name, parameter in list(piece.named_parameters()):
                if parameter.is_meta:
                    owner, _, attribute = name.rpartition(".")
                    value = self._start(prefix + name, weights).to(self.world.device, self._compute)
                    setattr(piece.get_submodule(owner), attribute, nn.Parameter(value))
            if self.strategy.zero == 3:
                self.world.meet()  # every rank reads the weights, its disk may be slower
                # Skips what an earlier call has sharded. float32 is no dtype DeepSpeed's own config knows here.
                init = zero_init(ds, self._compute, module=piece, config_dict_or_path=self.config, param_swapper=files)
                files = init.param_swapper

        for n, (name, layer) in enumerate(module.model.layers.items()):
            recompute(layer, level_of(self.strategy.recompute, n))
            fill(layer, f"model.layers.{name}.")
        fill(module, "")
        make_buffers(module, self.world.device)
        if self.strategy.zero == 3:
            # The loss multiplies by the head's weight itself, outside of the head's own forward.
            ds.zero.register_external_parameter(module, module.head_weight)
        return module

    def _initialize(self, ds: Any, optim: OptimSection) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": optim.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in self.module.named_parameters():
            groups[self._descriptions[name].kind in UNDECAYED]["params"].append(parameter)
        groups = [g for g in groups if g["params"]]
        self.world.meet()
        engine, *_ = ds.initialize(
            model=self.module, model_parameters=groups, config=self.config, dist_init_required=False
        )
        return engine

    def _formats(self) -> Iterator[Held]:
        """Yield what is held and in which format: weights, their parts here and in files, masters, moments."""
        sharded = self.strategy.zero == 3
        for parameter, name in self._names.items():
            formats = [parameter.dtype]
            if sharded:
                files = parameter.nvme_swapper
                formats += [] if files is None else [files.dtype]
                if (
                    parameter.ds_tensor.status.name == "AVAILABLE"
                ):  # else a placeholder in fp16: the part is in its file
                    formats.append(parameter.ds_tensor.dtype)
            yield from held("weight", ((name, f) for f in formats), self._compute)
        flats = [(f"of group {n}", flat) for n, flat in enumerate(self.fragments.flats)]
        yield from held("master", ((name, flat.dtype) for name, flat in flats), torch.float32)
        for moment in MOMENTS:
            states = ((name, self.fragments.base.state[flat][moment].dtype) for name, flat in flats)
            yield from held(f"moment {moment}", states, torch.float32)

    # ------------------------------------------------------------------------------------------------ the verbs

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        terms: Terms | None = None,
        between: Callable[[], None] | None = None,
    ) -> StepResult:
        if len(micro_batches) != self._accumulation:
            raise RuntimeError(f"{len(micro_batches)} micro-batches, but DeepSpeed was told {self._accumulation}")
        terms = self._set_terms(terms)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss, tokens, by_source = self._run(micro_batches, partial(self._begin_micro_batch, between))
        updated, norm = self._update()
        self.steps_done += 1
        self._updates += updated
        norm = norm if updated else math.nan
        result = StepResult(loss, norm, tokens, updated, loss_scale=self.loss_scale, by_source=by_source)
        return self._rebalance(result, terms)

    def _begin_micro_batch(self, between: Callable[[], None] | None, micro_step: int) -> None:
        if between is not None:
            between()
        self._seed(self.steps_done, micro_step)

    def _seed(self, step: int, micro_step: int) -> None:
        seed_random_numbers(self.seed, step, self.world.data_rank, micro_step)

    def _run(
        self, micro_batches: Sequence[MicroBatch], seed: Callable[[int], None]
    ) -> tuple[float, int, tuple[tuple[float, float], ...]]:
        """Run forward and backward of a step; return its mean loss over all ranks, its trained tokens, and the sums of
        loss and weight per source of several."""
        world = self.world
        tokens, weight, weights = self._count_tokens(micro_batches)
        rows, by_source = self._sources.rows(), ()
        self.engine.train()
        # DeepSpeed averages over the ranks, we want the sum over the step's global weight. It would also
        # divide by the accumulation: scale_wrt_gas tells it not to.
        scale = world.mesh.data_ranks / weight
        loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        loss = math.nan
        for n, batch in enumerate(micro_batches):
            seed(n)
            batch_loss = loss_of(self.engine, batch, world.device, rows)
            loss_sum += batch_loss.detach()
            if n == len(micro_batches) - 1:
                losses = torch.cat((loss_sum.cpu()[None], self._sources.losses(micro_batches, rows)))
                sums = world.sum(losses, TOKENS)
                loss, by_source = sums[0].item() / weight, pairs(sums[1:], weights)
                self._note_peak()
                if not math.isfinite(loss):
                    scale = math.nan  # makes every rank's gradients NaN, which DeepSpeed sees and skips the step
            self.engine.backward(batch_loss * scale, scale_wrt_gas=False)
            self._note_peak()
            if n < len(micro_batches) - 1:
                self.engine.step()  # counts the micro-batch
        return loss, tokens, by_source

    def culprits(self, micro_batches: Sequence[MicroBatch]) -> list[Culprit]:
        watch, last = GradientWatch(self.module), len(micro_batches) - 1
        # The first layer's smallest gradient, made NaN in the last backward, keeps DeepSpeed from an update.
        trained = [t for t in self.spec.tensors() if self.spec.trains(t) and t.name.startswith("model.layers.0.")]
        poison = min(trained, key=lambda t: prod(t.shape)).name
        scaler = scaler_state(self._scaler) if self._compute == torch.float16 else None

        def begin(micro_batch: int) -> None:
            watch.micro_batch, watch.poisoned = micro_batch, poison if micro_batch == last else None
            self._seed(self.steps_done - 1, micro_batch)

        with watch.looking():
            self._run(micro_batches, begin)
        self._update()
        if scaler is not None:
            restore_scaler(self._scaler, scaler)
        self.balancer.drop_counts()
        return culprits(watch.found, micro_batches)

    def _update(self) -> tuple[bool, float]:
        """Run DeepSpeed's optimizer; return whether anything changed, and the norm of the whole gradient."""
        scale = self.loss_scale or 1.0
        checked = self.strategy.zero > 0 or self._compute != torch.float32
        if checked:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            # Stage 0's fp16 optimizer, alone of all, gives the norm of the scaled gradients.
            return self.engine.was_step_applied(), norm if self.strategy.zero else norm / scale
        # Stage 0 in fp32 is plain AdamW, which updates whatever the gradients hold.
        norm = nn.utils.get_total_norm([p.grad for p in self._names if p.grad is not None]).item()
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.optimizer.zero_grad()
            self.engine.micro_steps += 1  # as its step() counts
        return math.isfinite(norm), norm

    @property
    def loss_scale(self) -> float | None:
        """The scale of fp16's dynamic loss scaling; None in other precisions."""
        return float(self._scaler.cur_scale) if self._compute == torch.float16 else None

    @property
    def _scaler(self) -> Any:
        optimizer = self.engine.optimizer
        return optimizer.loss_scaler if self.strategy.zero else optimizer.loss_scale_config

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole fp32 parameter), put together one at a time; every rank must run through all of them."""
        yield from self.fragments.wholes({name: t.shape for name, t in self._descriptions.items()})
        yield from self.balancer.biases().items()

    # -------------------------------------------------------------------------------------------- saved state

    def save(self, folder: Path) -> Save:
        """Write this rank's flat ranges in our own format: DeepSpeed's is a pickle, and bound to the rank count."""
        position = self._position()
        if self._compute == torch.float16:
            position["scaler"] = scaler_state(self._scaler)
        copies = (1 + len(MOMENTS)) * sum(flat.nbytes for flat in self.fragments.flats)
        background = on_cards(self.fragments.flats) and room_for_copies(copies, self.world.size)
        return Save(lambda: self._parts(folder), position, background, layout="flat", engine="deepspeed")

    def _parts(self, folder: Path) -> Iterator[SavedFile]:
        """Yield what is in memory as one part, and each group that lives in files as one of its own."""
        stem = f"rank-{self.world.rank}"
        here = SavedFile(folder / f"{stem}.safetensors", {}, {})
        for group, fragments in self.fragments.to_save():
            part = here if group is None else SavedFile(folder / f"{stem}-group-{group}.safetensors", {}, {})
            for fragment in fragments:
                part.rows[fragment.name] = fragment.begin
                part.tensors[f"weights/{fragment.name}"] = fragment.master
                part.tensors.update({f"{m}/{fragment.name}": t for m, t in fragment.moments.items()})
            if group is not None:
                yield part
        if self.world.rank == 0:  # equal on all ranks
            for name, tensor in self.balancer.state():
                here.rows[name] = 0
                here.tensors[f"balance/{name}"] = tensor.flatten()
        yield here

    @torch.no_grad()
    def load(self, folder: Path) -> list[str]:
        reader = self._open_saved(folder)
        for fragment in self.fragments.each():
            row = self._descriptions[fragment.name].shape[1:]
            for what, target in {"weights": fragment.master, **fragment.moments}.items():
                reader.read_elements(f"{what}/{fragment.name}", fragment.begin, target, row)

        def whole(name: str) -> Tensor:
            value = torch.empty(self._descriptions[name].shape)
            reader.read_into(f"weights/{name}", 0, value)
            return value

        self._fill_compute(whole)
        self._restore_counts(reader)
        self.fragments.set_updates(self._updates)
        if self._compute == torch.float16:
            restore_scaler(self._scaler, reader.position.get("scaler", {}))
        return restored(reader, "deepspeed")

    @torch.no_grad()
    def _fill_masters(self, whole: Callable[[str], Tensor]) -> None:
        for fragment in self.fragments.each():
            value = whole(fragment.name).reshape(-1)
            fragment.master.copy_(value[fragment.begin : fragment.begin + fragment.master.numel()])

    @torch.no_grad()
    def _fill_compute(self, whole: Callable[[str], Tensor]) -> None:
        """Bring new values into the weights that compute: each rank its own shard, or everything under 1 and 2."""
        for parameter, name in self._names.items():
            value = whole(name)
            if self.strategy.zero < 3:
                parameter.data.copy_(value)
                continue
            if parameter.data.numel() == value.numel():  # a small one, that stage 3 leaves whole on every rank
                parameter.data.copy_(value)
            shard, files = parameter.ds_tensor, parameter.nvme_swapper
            swapped = files if files is not None and shard.status.name == "NOT_AVAILABLE" else None
            if swapped is not None:
                swapped.swap_in([parameter], async_op=False)
            begin = self.world.data_rank * shard.numel()
            part = value.reshape(-1)[begin : begin + shard.numel()]
            shard.data[: part.numel()].copy_(part)
            if swapped is not None:
                swapped.swap_out_and_release([parameter])

    # ------------------------------------------------------------------------------------------------- memory

    def _held_bytes(self) -> dict[str, int]:
        """Return bytes by ledger row; what an offload holds on the host counts as `states` and `pinned`, as in a plan."""
        rows = self.fragments.held()
        if self.strategy.zero == 3:
            rows["weights"] = [p.ds_tensor.data for p in self._names]
            rows["buffers"] += [p.data for p in self._names]  # whole ones: being used, or too small to be cut
        else:
            rows["weights"] = [p.data for p in self._names]
        elsewhere = {}
        if self.strategy.offload_optimizer != "none":
            elsewhere |= {"master": "states", "optimizer": "states"}
        if self.strategy.offload_weights != "none":
            elsewhere |= {"weights": "states"}
        if "weights" in self.strategy.on_nvme:
            files = next(iter(self._names)).nvme_swapper
            rows["pinned"].append(files.buffers)
        counted: set[int] = set()
        result = dict.fromkeys(rows, 0)
        # Buffers before gradients: in backward a gradient may be a view of a bucket.
        for row in ("pinned", "weights", "master", "optimizer", "buffers", "gradients"):
            place = elsewhere.get(row, row)
            result[place] = result.get(place, 0) + sum(once_each(rows[row], counted))
        return result


# ------------------------------------------------------------------------------------------- DeepSpeed's own ways


def import_deepspeed() -> Any:
    """Return the library, kept quiet. Raises InputError with the way to install it."""
    require_deepspeed()
    with _quiet(), _uncompiled():
        import deepspeed
        import deepspeed.ops

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it calls what torch renames
    # On a CPU it would compile a library for sums through shared memory, in every rank, at its first use: gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _join(world: World, ds: Any) -> None:
    """Let DeepSpeed use the process group that is there. It needs one even for a single process."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # it picks its device by this and nothing else
    with _quiet():
        ds.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's chatter below warnings out of the log."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(logging.WARNING)  # its import sets the level itself


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let its modules load without torch.compile: an optimizer that is not used here would load all of Inductor."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
