"""Weights in host memory, fetched block by block. Twin of spec/axes/host.py.

| what | where | how often |
|---|---|---|
| weights that compute | host, shared by the ranks | once per machine |
| fp32 masters (where weights are not fp32) | host, shared | once per machine |
| moments, summed gradients | host, each rank those of its rows | once per machine |
| a block's gradients on their way | host, shared, two blocks per rank; none with one rank | |
| blocks' inputs | host, each rank its own | one per block and micro-batch |
| two blocks' weights, two blocks' fp32 gradients | card | |

The ranks add up in host memory: each rank its own rows, over ranks 0, 1, 2, … in this order, in fp32. Nothing goes from
card to card. On a CPU the weights are computed with where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.parallel.data import accumulate_in
from tercet.parallel.host_memory import own, pin, shared
from tercet.parallel.layout import Inputs, Layout
from tercet.parallel.parameter_shard import ParameterShard
from tercet.parallel.precision import Precision
from tercet.parallel.streams import Copier
from tercet.parallel.world import World
from tercet.spec.axes.host import BEGIN, Sizes, ends_with_embedding, groups, places
from tercet.spec.mesh import AXES
from tercet.spec.model import Model
from tercet.spec.model import Tensor as Description
from tercet.spec.placement import region


@dataclass(eq=False)
class Group:
    """Tensors that are fetched, summed and updated together; `begins` says where each lies in a buffer of `size`."""

    number: int  # BEGIN, a block's, or the one after the last block's
    tensors: Sequence[Description]
    begins: Sequence[int]
    size: int
    working: Tensor  # host: what is fetched
    masters: Tensor  # host: what is updated; the same memory as `working` where the formats are
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    parts: list[ParameterShard] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # host, fp32: of each part, over micro-batches and ranks
    squares: Tensor | None = None  # of `sums`, added up
    updated: int = 0  # the job after which the weights are those of the coming step

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield each tensor's place in a buffer, in order."""
        for t, begin in zip(self.tensors, self.begins, strict=True):
            yield flat[begin : begin + t.parameters].view(t.shape)


@dataclass(eq=False)
class Brought:
    """A group's weights on the card; `ready` is the event of the copy's end, `room` that of its beginning."""

    flat: Tensor
    room: Any
    ready: Any = None
    issued: bool = False


class HostLayout(Layout):
    """Layout of strategy host. The schedule must go block by block (engine/schedules/blocks_first.py)."""

    copied_along = tuple(axis for axis in AXES if axis != "shard")
    on_host = True

    def __init__(
        self,
        module: nn.Module,
        spec: Model,
        world: World,
        precision: Precision,
        start: Callable[[Description], Tensor],
    ):
        """`module` is on meta but for its buffers; `start` returns a whole tensor's start."""
        self.module, self.world, self.device = module, world, world.device
        self._on_card = world.device.type != "cpu"
        self._compute = precision.compute
        self._embedding_ends = ends_with_embedding(spec)
        self._last_block = len(spec.layers)  # the number of the end
        self.groups = self._allocate(spec, precision)
        self._install(module)
        self.parts = [part for group in self.groups for part in group.parts]
        self._fill(start)
        self.jobs = world.jobs()
        self._partners = Partners(world.partners())
        self._weights, self._inputs, self._out = (Copier(self.device) for _ in range(3))
        self._brought: dict[int, Brought] = {}
        self._gradients: dict[int, Tensor] = {}  # on the card, or on a CPU where they are summed
        self._leaving: list[tuple[Any, Tensor]] = []  # (event of the copy's end, the card's memory until then)
        self._sent = 0  # groups whose gradients have left this step
        self._summed: list[int] = []  # the job of each
        self._kept: HostInputs | Inputs = Inputs()
        self._evaluating = False
        self.fetches: dict[int, int] = {}  # of each group since the engine began
        if self._on_card:
            self._hook_blocks()

    # ---------------------------------------------------------------------------------------------- building

    def _allocate(self, spec: Model, precision: Precision) -> list[Group]:
        sizes, world = Sizes.of(spec), self.world
        working = pin(shared(sizes.whole, precision.compute, world), self.device)
        masters = shared(sizes.whole, precision.kept, world) if precision.has_master else working
        self._has_master = precision.has_master
        self._slabs = [working] + ([masters] if precision.has_master else [])
        self._staging: list[list[Tensor]] = []  # per rank, two buffers
        self._own_sums: list[Tensor] = []
        if world.size > 1:
            staging = pin(shared(world.size * 2 * sizes.largest, torch.float32, world), self.device)
            self._slabs.append(staging)
            cut = staging.split(sizes.largest)
            self._staging = [list(cut[2 * r : 2 * r + 2]) for r in range(world.size)]
        found, begin = [], 0
        for number, tensors in enumerate(groups(spec), start=BEGIN):
            begins, size = places(tensors)
            flat = slice(begin, begin + size)
            found.append(Group(number, tensors, begins, size, working[flat], masters[flat]))
            begin += size
        return found

    def _install(self, module: nn.Module) -> None:
        """Give the module its parameters: on a CPU the weights themselves, on a card nothing until they are fetched."""
        self._blank = torch.full((), float("nan"), dtype=self._compute, device=self.device)
        every = dict(module.named_parameters(remove_duplicate=False))
        for group in self.groups:
            flat = own(group.size, torch.float32, self.world) if self.world.size == 1 else None
            if flat is not None:
                self._own_sums.append(pin(flat, self.device))
            rows = zip(group.tensors, group.views(group.working), group.views(group.masters), strict=True)
            for n, (t, working, master) in enumerate(rows):
                value = self._blank.expand(t.shape) if self._on_card else working
                group.parameters[t.name] = self._set(module, every, t.name, value)
                own_rows = region(t.shape[0], self.world.size, self.world.rank)
                if own_rows.rows:
                    group.parts.append(ParameterShard(t, own_rows, master[own_rows.slice]))
                    sums = flat[group.begins[n] :][: t.parameters].view(t.shape) if flat is not None else None
                    group.sums.append(own_like(master[own_rows.slice]) if sums is None else sums)

    @staticmethod
    def _set(module: nn.Module, every: dict[str, nn.Parameter], name: str, value: Tensor) -> nn.Parameter:
        """Replace a parameter on meta, in every place where it stands."""
        made = nn.Parameter(value)
        for other in [n for n, p in every.items() if p is every[name]]:
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made)
        return made

    def _fill(self, start: Callable[[Description], Tensor]) -> None:
        """Put the start into the shared memory: each tensor by one rank."""
        n = 0
        for group in self.groups:
            for t, working, master in zip(
                group.tensors, group.views(group.working), group.views(group.masters), strict=True
            ):
                if n % self.world.size == self.world.rank or self.world.host.type != "cpu":
                    master.copy_(start(t))
                    if self._has_master:
                        working.copy_(master)
                n += 1
        if self.world.host.type == "cpu":
            self.world.meet()  # all of it is there

    def _hook_blocks(self) -> None:
        for n, (_, layer) in enumerate(self.module.blocks()):
            if n < self._last_block:
                layer.register_forward_pre_hook(lambda *_, n=n: self.fetch(n) if self._evaluating else None)
                layer.register_forward_hook(lambda *_, n=n: self.release(n) if self._evaluating else None)

    # ------------------------------------------------------------------------------------------- verbs of a step

    def group(self, number: int) -> Group:
        return self.groups[number - BEGIN]

    def begin_step(self) -> None:
        self._sent = 0
        self._summed = []

    def inputs(self) -> Inputs:
        if self._on_card and isinstance(self._kept, HostInputs):
            self._kept.begin()
        elif self._on_card:
            self._kept = HostInputs(self.world, self._inputs, self._out)
        return self._kept

    def fetch(self, block: int, backward: bool = False) -> None:
        """Have a group's weights where they compute, updated; with `backward` also zeros to add its gradients into."""
        wanted = self._wanted(block, backward)
        for number in wanted:
            self._bring(number)
        for number in wanted:
            self._weights.await_here(self._brought[number].ready)
            self._point(self.group(number), self._brought[number].flat)
        if backward:
            for number in (block, BEGIN) if self._end_embeds(block) else (block,):
                self._make_gradients(number)
        coming = self._next(block, backward)
        if self._on_card and coming is not None:
            for number in self._wanted(*coming):
                self._reserve(number)

    def release(self, block: int, backward: bool = False) -> None:
        """Say that a group is not needed until the next `fetch`; complete gradients leave, what comes next is brought."""
        for number in self._wanted(block, backward):
            self._point(self.group(number), None)
            self._brought.pop(number, None)
        if backward:
            self._send(block)
        coming = self._next(block, backward)
        if self._on_card and coming is not None:
            for number in self._wanted(*coming):
                self._bring(number)
        keep = 1 if backward else 0  # what left before this group has been written meanwhile
        while len(self._leaving) > keep:
            self._out.await_here(self._leaving.pop(0)[0])

    def _wanted(self, block: int, backward: bool) -> tuple[int, ...]:
        """Return the groups whose weights a group needs: an embedding's gradient does not depend on them."""
        if block == BEGIN and backward:
            return ()
        return (block, BEGIN) if self._end_embeds(block) else (block,)

    def _end_embeds(self, block: int) -> bool:
        return block == self._last_block and self._embedding_ends

    def _next(self, block: int, backward: bool) -> tuple[int, bool] | None:
        """Return what is fetched after this group."""
        if self._evaluating:
            return (block + 1, False) if block + 1 < self._last_block else None
        if block == self._last_block:
            return block - 1, True
        if not backward:
            return block + 1, block + 1 == self._last_block
        return (block - 1, True) if block > 0 else None

    def _reserve(self, number: int) -> None:
        """Take room on the card: the copy may begin when what is queued so far is done."""
        if number not in self._brought:
            flat = torch.empty(self.group(number).size, dtype=self._compute, device=self.device)
            self._brought[number] = Brought(flat, self._weights.now())

    def _bring(self, number: int) -> None:
        """Begin the copy of a group's weights, once its update is done."""
        group = self.group(number)
        self.jobs.wait(group.updated)
        if not self._on_card:
            self._brought.setdefault(number, Brought(group.working, None))
            return
        self._reserve(number)
        brought = self._brought[number]
        if not brought.issued:
            brought.ready = self._weights.copy(brought.flat, group.working, brought.room)
            brought.issued = True
            self.fetches[number] = self.fetches.get(number, 0) + 1

    def _point(self, group: Group, flat: Tensor | None) -> None:
        """Let the parameters be views of `flat`; of nothing, NaN, where that is None, so that a use would show."""
        if not self._on_card:
            return
        views = group.views(flat) if flat is not None else (self._blank.expand(t.shape) for t in group.tensors)
        for parameter, view in zip(group.parameters.values(), views, strict=True):
            parameter.data = view

    # -------------------------------------------------------------------------------------------- gradients

    def _make_gradients(self, number: int) -> None:
        if number in self._gradients:
            return
        group = self.group(number)
        early = number == BEGIN and self._embedding_ends  # from the end on, while others come and go
        if self._on_card or (early and self.world.size > 1):
            flat = torch.zeros(group.size, dtype=torch.float32, device=self.device)
        else:
            flat = self._room_for(group).zero_()
        self._gradients[number] = flat
        for parameter, view in zip(group.parameters.values(), group.views(flat), strict=True):
            accumulate_in(parameter, view)

    def _room_for(self, group: Group) -> Tensor:
        """Return where the group's gradients go on the host: its sums with one rank, a staging buffer with several."""
        if self.world.size == 1:
            self.jobs.wait(group.updated)  # by what lies there now
            return self._own_sums[group.number - BEGIN]
        order = self._order(group)
        if order:  # all ranks have begun to add up the one before, so have done with the one before that
            self.jobs.wait(self._summed[order - 1])
        return self._staging[self.world.rank][order % 2][: group.size]

    def _order(self, group: Group) -> int:
        """Return the group's turn in backward: the end is first, the embedding last."""
        return self._last_block - group.number

    def _send(self, block: int) -> None:
        """Hand a group's whole gradients of this rank to the host, to be added up with the others'."""
        group, flat = self.group(block), self._gradients.pop(block)
        room, written = self._room_for(group), None
        if flat.data_ptr() != room.data_ptr():
            written = self._out.copy(room, flat, self._out.now())
            self._leaving.append((written, flat))
        for parameter in group.parameters.values():
            parameter.grad = None
        # This rank reads its rows of every rank's buffer, writes their sum, and reads that again for the norm.
        ranks = self.world.size
        moved = 4.0 * group.size * (1 + 2 / ranks if ranks > 1 else 1)
        self._summed.append(self.jobs.add(lambda: self._add_up(group, written), written, moved))

    def _add_up(self, group: Group, written: Any) -> None:
        if written is not None:
            written.synchronize()
        if self.world.size > 1:
            self._partners.wait()
            turn = self._order(group) % 2
            of_ranks = [dict(zip(group.parameters, group.views(rank[turn]), strict=True)) for rank in self._staging]
            for part, total in zip(group.parts, group.sums, strict=True):
                total.copy_(of_ranks[0][part.name][part.region.slice])
                for one in of_ranks[1:]:
                    total.add_(one[part.name][part.region.slice])
        # Row by row: whoever holds a row gets the same norm of it, so the whole norm does not depend on the ranks.
        norms = [torch.linalg.vector_norm(total.view(len(total), -1), dim=1) for total in group.sums]
        group.squares = torch.cat([*norms, torch.zeros(1, device=self.world.host)]).double().square().sum()

    def finish_gradients(self) -> None:
        self._leaving.clear()
        self.jobs.wait()
        if self.world.size > 1:
            self._partners.wait()  # nobody adds up any more: the staging buffers are free for the next step
        for group in self.groups:
            for part, total in zip(group.parts, group.sums, strict=True):
                part.value.grad = total

    def square_sum(self) -> Tensor:
        """Return the sum of squares of this rank's rows of all gradients, fp64."""
        found = torch.stack([group.squares for group in self.groups if group.squares is not None]).sum()
        return torch.ones_like(found, device="cpu") if found.is_meta else found  # a rehearsal's host has no values

    # ------------------------------------------------------------------------------------------------ updates

    def update(self, step: Callable[[Group], None]) -> None:
        """Have every group updated by `step`, in forward order, each before its next fetch."""
        for group in self.groups:
            rows = sum(part.value.numel() for part in group.parts)
            group.updated = self.jobs.add(lambda group=group: self._update(group, step), updates=rows)

    @torch.no_grad()
    def _update(self, group: Group, step: Callable[[Group], None]) -> None:
        step(group)
        self._publish(group)
        self._partners.wait()

    def _publish(self, group: Group) -> None:
        """Bring this rank's rows of the masters to where they are fetched from."""
        if not self._has_master:
            return
        into = dict(zip(group.parameters, group.views(group.working), strict=True))
        for part in group.parts:
            into[part.name][part.region.slice].copy_(part.value)

    def complete(self) -> None:
        """Return when every update that was decided on is done, on every rank."""
        self.jobs.wait()

    def after_update(self) -> None:
        """Parts were changed from outside (a checkpoint was read): let every rank fetch them."""
        with torch.no_grad():
            for group in self.groups:
                self._publish(group)
        self._partners.wait()

    # ---------------------------------------------------------------------------------- evaluation, what is held

    def begin_evaluation(self) -> None:
        self.complete()
        self._evaluating = True
        for number in dict.fromkeys((BEGIN, self._last_block)):
            self._bring(number)
            self._weights.await_here(self._brought[number].ready)
            self._point(self.group(number), self._brought[number].flat)

    def end_evaluation(self) -> None:
        self._evaluating = False
        for number in (BEGIN, self._last_block):
            self._point(self.group(number), None)
        self._brought.clear()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.complete()
        for group in self.groups:
            for name, value in zip(group.parameters, group.views(group.masters), strict=True):
                yield name, value.float()

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by ledger row; what the ranks share is rank 0's."""
        first = self.world.rank == 0
        rows: dict[str, list[Tensor]] = {"weights": [], "master": [], "gradients": []}
        rows["states"] = self._slabs[:1] if first else []
        rows["states"] += self._slabs[1:2] if first and self._has_master else []
        rows["pinned"] = [*self._own_sums] if self.world.size == 1 else [s for g in self.groups for s in g.sums]
        rows["pinned"] += self._slabs[-1:] if first and self.world.size > 1 else []
        if self._on_card:
            rows["weights"] += [b.flat for b in self._brought.values()]
            rows["gradients"] += [*self._gradients.values(), *(flat for _, flat in self._leaving)]
            rows["pinned"] += self._kept.held() if isinstance(self._kept, HostInputs) else []
        return rows


def own_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)


class HostInputs(Inputs):
    """Blocks' inputs in this rank's host memory, written and read back beside the computing."""

    def __init__(self, world: World, into: Copier, out: Copier):
        super().__init__()
        self._world, self._into, self._out = world, into, out
        self._places: dict[tuple[int, int], Tensor] = {}
        self.begin()

    def begin(self) -> None:
        self._written: dict[tuple[int, int], Any] = {}
        self._order: list[tuple[int, int]] = []
        self._leaving: list[tuple[Any, Tensor]] = []
        self._coming: dict[tuple[int, int], tuple[Tensor, Any]] = {}

    def put(self, block: int, n: int, x: Tensor) -> None:
        place = self._places.get((block, n))
        if place is None or place.shape != x.shape or place.dtype != x.dtype:
            place = pin(torch.empty(x.shape, dtype=x.dtype, device=self._world.host), self._world.device)
            self._places[block, n] = place
        self._written[block, n] = self._out.copy(place, x, self._out.now())
        self._leaving.append((self._written[block, n], x))
        while len(self._leaving) > 2:  # those before have been written while the last one was computed with
            self._out.await_here(self._leaving.pop(0)[0])

    def get(self, block: int, n: int) -> Tensor:
        while self._leaving:
            self._out.await_here(self._leaving.pop(0)[0])
        self._read(block, n)
        x, ready = self._coming.pop((block, n))
        self._into.await_here(ready)
        coming = (block, n + 1) if (block, n + 1) in self._written else (block - 1, 0)
        if coming in self._written:
            self._read(*coming)
        return x

    def _read(self, block: int, n: int) -> None:
        if (block, n) in self._coming:
            return
        place = self._places[block, n]
        x = torch.empty(place.shape, dtype=place.dtype, device=self._world.device)
        if (written := self._written[block, n]) is not None:
            written.synchronize()  # long since: it was written in forward, and what ends the step is queued behind it
        self._coming[block, n] = (x, self._into.copy(x, place, self._into.now()))

    def held(self) -> list[Tensor]:
        return list(self._places.values())


class Partners:
    """The ranks' work beside the cards' meets here: a group of its own, without a clock; a rank that ends is noticed."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group

    def wait(self) -> None:
        if self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)
