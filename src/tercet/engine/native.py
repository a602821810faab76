"""The native engine: PyTorch, one process or many. Order of what is applied: recompute -> shard -> compile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tercet.engine import MicroBatch, StepResult, Terms
from tercet.engine.optim import build_optimizer, scale_gradients, square_sum
from tercet.engine.schedules import StepWork, loss_of, schedule_of
from tercet.engine.seeds import seed_random_numbers
from tercet.engine.shards import Part, Provider, Reader, Save, on_cards, restored
from tercet.errors import InputError
from tercet.model.balance import Balancer
from tercet.model.build import fill_parameters, make_buffers
from tercet.model.decode import generate
from tercet.model.decoder import Decoder, initial_tensor
from tercet.parallel.data import Replicated
from tercet.parallel.layout import Layout
from tercet.parallel.mesh import lay_out
from tercet.parallel.part import chunk_rows
from tercet.parallel.precision import PRECISIONS
from tercet.parallel.recompute import recompute
from tercet.parallel.world import World
from tercet.spec.families.through_transformers import TransformersModel
from tercet.spec.mesh import SAME_TOKENS, TOKENS
from tercet.spec.model import Model
from tercet.spec.optimizers.adamw import MOMENTS
from tercet.spec.recipe import OptimSection
from tercet.spec.strategy import Strategy


class NativeEngine:
    """Implements tercet.engine.Engine for zero 0 to 3."""

    def __init__(
        self,
        spec: Model,
        strategy: Strategy,
        optim: OptimSection,
        precision: str,
        world: World,
        *,
        seed: int,
        weights: Provider | None = None,
        vocabulary: int | None = None,
        stop_ids: Sequence[int] = (),
    ):
        self.spec, self.world, self.seed = spec, lay_out(world, strategy.mesh), seed
        self._clip = math.inf if optim.clip == "none" else optim.clip
        self._vocabulary = vocabulary or spec.vocabulary
        self._stop_ids = tuple(stop_ids)
        self._precision = PRECISIONS[precision]
        self.steps_done = 0  # optimizer steps, skipped ones included; seeds the random numbers of a step
        self._updates = 0  # of these, the ones that changed the weights: AdamW's own count
        self._peak: dict[str, int] = {}
        self._schedule = schedule_of(strategy)
        self.layout = self._build(strategy, weights)
        self.module = self.layout.module
        self.balancer = Balancer(self.module)
        if weights is not None:
            for name, bias in self.balancer.biases().items():
                bias.copy_(weights.tensor(name))
        if isinstance(spec, TransformersModel):
            from tercet.model.through_transformers import check_documents

            check_documents(self.module, spec, world.device)
            self.layout.end_evaluation()
        self.optimizer = build_optimizer(self.layout.parts, optim)
        self._make_moments()

    # ------------------------------------------------------------------------------------------------ building

    def _build(self, strategy: Strategy, weights: Provider | None) -> Layout:
        """Build on meta, then allocate and fill piece by piece: a sharded model is never whole on one rank."""
        module = self._empty_module()
        kinds = {t.name: t for t in self.spec.tensors()}

        mesh = self.world.mesh
        sharded = mesh.shard > 1

        def value_of(name: str) -> Tensor:
            t = kinds[name]
            if weights is None:
                return initial_tensor(t.name, t.shape, t.kind, self.spec, self.seed).to(self.world.device)
            if not sharded:
                return weights.tensor(name).to(self.world.device, torch.float32)
            # Only the rows that this rank will keep are read. The rest of the whole tensor is cut off next and never
            # touched, and memory of the host that was never touched is not there.
            begin, end = chunk_rows(t.shape[0], mesh.shard, mesh.position(self.world.rank)["shard"])
            value = torch.empty(t.shape, dtype=torch.float32, device=self.world.device)
            value[begin:end] = weights.rows(name, begin, end)
            return value

        sharder = None
        if sharded:
            # FSDP2 takes a second to import: only those pay it who shard.
            from tercet.parallel.shard import Sharded, Sharder

            sharder = Sharder(self.world, self._precision, strategy)
        for prefix, layer in module.blocks():
            fill_parameters(layer, prefix, value_of)
            recompute(layer, strategy.recompute)
            if sharder is not None:
                sharder.shard(layer)
            if strategy.compile:
                # Document borders differ from batch to batch: compiled in, each would be compiled anew.
                layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)
                layer.compile(dynamic=False)
        fill_parameters(module, "", value_of)
        make_buffers(module, self.world.device)
        if sharder is not None:
            sharder.shard(module)
            return Sharded(module, self.spec, self.world, self._precision, strategy)
        return Replicated(module, self.spec, self.world, self._precision, strategy.offload_optimizer != "none")

    def _empty_module(self) -> torch.nn.Module:
        if isinstance(self.spec, TransformersModel):
            from tercet.model.through_transformers import ThroughTransformers

            return ThroughTransformers(self.spec)
        with torch.device("meta"):
            return Decoder(self.spec)

    def _make_moments(self) -> None:
        """Allocate the moments now, not at the first step: what is held is then the same at every moment."""
        for part in self.layout.parts:
            state = self.optimizer.state[part.value]
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.value.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(part.value)

    # ------------------------------------------------------------------------------------------------ the verbs

    def step(self, micro_batches: Sequence[MicroBatch], lr: float, terms: Terms | None = None) -> StepResult:
        layout, world = self.layout, self.world
        tokens = int(world.sum(torch.tensor([sum(b.trained_tokens for b in micro_batches)]), TOKENS).item())
        terms = terms or Terms(self.spec.balance, self.module.mtp_weight)
        self.module.balance, self.module.mtp_weight = terms.balance, terms.mtp_weight
        layout.begin_step()
        self.module.train()
        seed = partial(seed_random_numbers, self.seed, self.steps_done, world.data_rank)
        work = StepWork(self.module, layout, micro_batches, max(tokens, 1), world.device, seed, self._note_peak)
        loss_sum = self._schedule(work)
        layout.finish_gradients()
        self._note_peak()
        result = self._update(loss_sum, tokens, lr)
        if self.balancer:
            result = self._rebalance(result, terms)
        layout.end_step()
        self.steps_done += 1
        return result

    def _update(self, loss_sum: Tensor, tokens: int, lr: float) -> StepResult:
        """Clip and update if loss and norm are finite on every rank; decide from sums, so all decide alike."""
        parts = self.layout.parts
        squares = square_sum(parts) if parts else torch.zeros((), dtype=torch.float64)
        mesh, rank = self.world.mesh, self.world.rank
        # What several ranks hold alike, the first of them counts.
        once = torch.tensor([mesh.index(rank, axes) == 0 for axes in (SAME_TOKENS, self.layout.copied_along)])
        sums = self.world.sum(torch.where(once, torch.stack((loss_sum.cpu(), squares)), 0.0))
        loss, norm = sums[0].item() / max(tokens, 1), sums[1].sqrt().item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return StepResult(loss, norm, tokens, updated=False)
        if norm > self._clip:
            scale_gradients(parts, self._clip / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._updates += 1
        self.layout.after_update()
        return StepResult(loss, norm, tokens)

    def _rebalance(self, result: StepResult, terms: Terms) -> StepResult:
        """Move the experts' biases by the whole step's counts, once, after the optimizer; a skipped step by none."""
        if not result.updated:
            self.balancer.drop_counts()
            return result
        load = self.balancer.update(self.world.sum(self.balancer.counts(), TOKENS), terms.balance.bias_speed)
        figures = {"expert_load": load.worst, "idle_experts": load.idle, "expert_choices": load.choices}
        return replace(result, load=figures, expert_counts=load.counts.long().tolist())

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        self.module.eval()
        loss = loss_of(self.module, batch.to(self.world.device))
        self.layout.end_evaluation()
        return loss.item(), batch.trained_tokens

    def generate(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        self.module.eval()
        texts = [
            generate(
                self.module,
                len(self.spec.layers),
                prompt,
                n,
                vocabulary=self._vocabulary,
                device=self.world.device,
                stop=self._stop_ids,
                fixed_length=self.world.size > 1,
            )
            for prompt in prompts
        ]
        self.layout.end_evaluation()
        return texts

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.layout.weights()
        yield from self.balancer.biases().items()

    # -------------------------------------------------------------------------------------------- saved state

    def _saved_rows(self) -> list[tuple[str, Tensor, int]]:
        """Return (key, rows, first row) that this rank writes: a replica writes its chunk, so each row is written once."""
        found = []
        mesh, axes = self.world.mesh, self.layout.copied_along
        for part in self.layout.parts:
            cut = slice(*chunk_rows(part.end - part.begin, mesh.size(axes), mesh.index(self.world.rank, axes)))
            begin = part.begin + cut.start
            if cut.start == cut.stop:
                continue
            state = self.optimizer.state[part.value]
            found.append((f"weights/{part.name}", part.value[cut], begin))
            found += [(f"{m}/{part.name}", state[m][cut], begin) for m in MOMENTS]
        if self.world.rank == 0:  # equal on all ranks
            found += [(f"balance/{name}", tensor, 0) for name, tensor in self.balancer.state()]
        return found

    def save(self, folder: Path) -> Save:
        rows = self._saved_rows()
        part = Part(
            folder / f"rank-{self.world.rank}.safetensors",
            {key: tensor for key, tensor, _ in rows},
            {key.partition("/")[2]: begin for key, _, begin in rows},
        )
        position = {"steps_done": self.steps_done, "updates": self._updates}
        # Where the parameters' state lies decides: the experts' biases are on the card whatever is offloaded.
        return Save(lambda: [part], position, background=on_cards(part.value for part in self.layout.parts))

    @torch.no_grad()
    def load(self, folder: Path) -> list[str]:
        reader = Reader(folder)
        wanted = {f"{what}/{t.name}" for t in self.spec.tensors() for what in ("weights", *MOMENTS)}
        wanted |= {f"balance/{name}" for name, _ in self.balancer.state()}
        if reader.keys() != wanted:
            missing, extra = sorted(wanted - reader.keys()), sorted(reader.keys() - wanted)
            raise InputError(
                f"{folder}: the saved state does not match the model: missing {missing[:6]}, unexpected {extra[:6]}",
                "Resume with the recipe of that run.",
            )
        for part in self.layout.parts:
            reader.read_into(f"weights/{part.name}", part.begin, part.value)
            for moment in MOMENTS:
                reader.read_into(f"{moment}/{part.name}", part.begin, self.optimizer.state[part.value][moment])
        for name, tensor in self.balancer.state():
            reader.read_into(f"balance/{name}", 0, tensor)
        self.steps_done, self._updates = reader.position["steps_done"], reader.position["updates"]
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
        counted: set[int] = set()
        result = {}
        for row, tensors in rows.items():
            result[row] = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in counted:  # views of one buffer count once
                    counted.add(storage.data_ptr())
                    result[row] += storage.nbytes()
        return result

    def _note_peak(self) -> None:
        if self.steps_done < 2:  # every step is alike
            for row, held in self._held_bytes().items():
                self._peak[row] = max(held, self._peak.get(row, 0))

    def memory(self) -> dict[str, dict[str, int]]:
        return {"between_steps": self._held_bytes(), "peak": dict(self._peak)}
