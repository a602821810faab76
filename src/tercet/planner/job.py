"""Job: all that a training step's cost depends on, whoever's program runs it.

A Strategy of ours becomes a Job in `of_strategy`; a published measurement becomes one in `published.py`. Ledger
and clock know Jobs only, so what is fitted to other people's runs is the same arithmetic that predicts ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from tercet.spec.optimizers.adamw import COUNT_BYTES
from tercet.spec.optimizers.blocks import BLOCK
from tercet.spec.placement import Place, Rules
from tercet.spec.strategy import Strategy, Work

# How the elementwise part of a layer is run; decides bytes moved, bytes kept and kernels launched.
#   eager     one kernel per operation as transformers writes them, norms through fp32 copies
#   native    tercet's own modules without torch.compile: same kernels, but norm and gate keep their inputs only
#   compiled  torch.compile per block: elementwise chains fused
#   fused     hand-written kernels (Triton, Transformer Engine, CUDA)
Kernels = Literal["eager", "native", "compiled", "fused"]
# How the loss treats logits. full: all at once, with a shifted fp32 copy (transformers before 4.45); unshifted: all at
# once, labels are shifted instead; chunked and fused: a part at a time.
Loss = Literal["full", "unshifted", "chunked", "fused"]


@dataclass(frozen=True)
class Job:
    ranks: int
    micro_batch: int
    sequence: int
    accumulation: int = 1
    zero: int = 0
    # Bytes per trained parameter.
    weight_bytes: float = 2
    master_bytes: float = 0
    gradient_bytes: float = 4
    state_bytes: float = 8
    state_blocks: bool = False  # the optimizer's states are ours in eight bits (spec/optimizers/blocks.py)
    rounds_by_chance: bool = False  # bf16 weights without masters, updated by us
    activation_bytes: int = 2
    matmul: str = "bf16"  # key of Gpu.flops; fp32 on the CPU
    # Of a frozen base (spec/adapter.py) per parameter; 0.5 + scales for nf4.
    frozen_bytes: float = 2
    outer_frozen_bytes: float = 2  # embedding and head of a frozen base: PEFT holds them in fp32 for nf4
    quantized: bool = False
    recompute: str = "none"  # none, selective, full
    kernels: Kernels = "native"
    loss: Loss = "fused"
    loss_chunks: int | None = None  # parts into which a hand-written loss cuts a micro-batch; None: CHUNK_TOKENS each
    offload: frozenset[str] = frozenset()
    nvme: frozenset[str] = frozenset()  # what of it lies in files: optimizer (masters and moments), weights
    reduce_every_micro_batch: bool = False
    step_in_backward: bool = False
    packed_attention: bool = True  # flash: the causal half only
    windows: bool = False  # launches pass through Windows' display driver
    graphs: bool = False  # CUDA graphs: launches cost nothing
    transport: Literal["collective", "copies", "round-robin"] = "collective"
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    deepspeed: bool = False  # its flat shards and buckets: rows are estimates then
    bucket: int | None = None  # elements of its gradient buckets, where a file says so; None: as our engine asks for
    host_shards: bool = False  # FSDP2's offload: fp32 shards live on the host and are gathered from there
    host_resident: bool = False  # strategy host: weights, gradients and states live on the host (planner/host.py)
    flat_buffers: bool = False  # zero 0 of ours: one flat gradient buffer, allocated for the engine's life
    exact: bool = False  # our native engine: rows are what it holds
    padding_share: float = 0.0  # share of the rows computed that only fill up the last micro-batches

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequence

    @property
    def step_tokens(self) -> float:
        """Tokens of rows that count, of one optimizer step over all ranks."""
        return self.tokens * self.accumulation * self.data_ranks * (1 - self.padding_share)

    @property
    def data_ranks(self) -> int:
        """Ranks that compute different rows, replicas or shards."""
        return self.ranks // (self.pipeline * self.context * self.tensor)

    @property
    def shards(self) -> int:
        """Ranks among which zero 1 to 3 divide what they hold."""
        return self.data_ranks

    def rules(self, frozen: bool = False, rank: int = 0) -> Rules:
        """Return how this job's tensors are placed; `frozen`: all but adapters are."""
        return _rules(self, frozen, rank)

    def _made_rules(self, frozen: bool, rank: int) -> Rules:
        away = self.offload & {"optimizer", "weights"}
        gradients: tuple[Place, ...] = ("card", "host") if "optimizer" in self.offload else ("card",)
        if self.step_in_backward or "gradients" in self.offload:
            gradients = ("host",) if "gradients" in self.offload else ()
        rules = Rules(
            parts=self.shards,
            part=rank,
            weight=self.weight_bytes,
            master=self.master_bytes,
            gradient=self.gradient_bytes,
            states=self.state_bytes,
            in_blocks=self.state_blocks,
            frozen=self.outer_frozen_bytes if self.exact else self.frozen_bytes,  # nf4 is counted by the byte
            frozen_outside=self.outer_frozen_bytes,
            cut_weights=self.zero == 3,
            weights_in=self._place("weights"),
            masters_in=self._place("optimizer"),
            states_in="host" if self.offload & {"states", "paged"} else self._place("optimizer"),
            gradients_in=gradients,
        )
        if self.host_resident:
            return replace(rules, cut="rows", cut_weights=True, cut_gradients=True, count=COUNT_BYTES)
        if frozen and not self.exact:
            cut = "whole" if self.zero == 0 or self.shards == 1 else "even"
            return replace(rules, cut=cut, cut_gradients=self.zero == 3)
        if self.deepspeed:
            return self._deepspeed_rules(rules)
        native = replace(
            rules,
            count=COUNT_BYTES,
            masters_in="host" if away else "card",
            pads_gradients=bool(self.master_bytes) or self.weight_bytes == 4,
        )
        if self.zero == 0 or self.shards == 1:
            return replace(native, gradients_stay=self.flat_buffers)
        return replace(native, cut="rows", cut_gradients=self.accumulation == 1 or self.reduce_every_micro_batch)

    def _place(self, what: str) -> Place:
        if what in self.nvme:
            return "file"
        return "host" if what in self.offload else "card"

    def _deepspeed_rules(self, rules: Rules) -> Rules:
        """Return DeepSpeed's placement as measured (tests/twins/test_ledger_deepspeed.py)."""
        on_host, mixed = "optimizer" in self.offload, bool(self.master_bytes)
        fp32_sums = mixed and self.gradient_bytes == 4  # else micro-batches are added up in the weights' format
        if (
            self.zero == 0
        ):  # plain data parallelism: in fp32 the weights are the masters, else gradients come in their type
            return replace(rules, gradient=self.weight_bytes)
        return replace(
            rules,
            cut="even",
            master=4,  # in fp32 too: a flat copy of what the rank updates
            cut_gradients=self.zero >= 2 or (not mixed and self.accumulation == 1),
            # Stage 1's bf16 optimizer adds up in fp32 and lets the last micro-batch's own gradients stand until then.
            extra_gradients=self.weight_bytes if self.zero == 1 and fp32_sums and not on_host else 0,
            # Stages 1 and 2 let go of their gradients after the update, but for stage 1's bf16 optimizer.
            gradients_stay=self.zero == 3 or (self.zero == 1 and fp32_sums),
            # On the way to the host stage 2 adds several micro-batches up on the card, in fp32 (engine/deepspeed/
            # config.py: summed_in); in fp32 they go at once, as they do under stage 3.
            leaving=4 if on_host and self.zero < 3 and fp32_sums and self.accumulation > 1 else 0,
        )


@lru_cache(maxsize=16)  # card, host and disk of one candidate are summed by the same rules
def _rules(job: Job, frozen: bool, rank: int) -> Rules:
    return job._made_rules(frozen, rank)


NF4_BYTES = 0.516  # 4 bits and an 8-bit constant per block of 64, itself quantised (arXiv 2305.14314, section 3)


def of_strategy(strategy: Strategy, work: Work, module: str = "tercet") -> Job:
    """Return the Job that an engine makes of a strategy (twin: engine/native.py); `module`: Model.module."""
    ours = module == "tercet"
    wide, in_blocks = work.precision == "fp32", work.optimizer == "adamw-8bit"
    offload = {
        what
        for what, where in (
            ("optimizer", strategy.offload_optimizer),
            ("weights", strategy.offload_weights),
            ("activations", strategy.offload_activations),
        )
        if where != "none"
    }
    deepspeed, host_resident = strategy.engine == "deepspeed", strategy.engine == "host"
    if host_resident:
        offload = {"optimizer", "weights", "gradients", "activations"}
    if deepspeed and "optimizer" in offload:
        offload.add("gradients")  # its ZeRO moves each reduced gradient to the host at once
    host_shards = (
        not deepspeed and bool(strategy.zero) and strategy.ranks > 1 and bool(offload & {"optimizer", "weights"})
    )
    if host_shards:
        # FSDP2 holds the shards once, with their gradients and the optimizer: there is no second copy of the weights.
        offload = offload - {"weights"} | {"optimizer", "gradients"}
    accumulation = strategy.accumulation(work.batch_sequences)
    rows = accumulation * strategy.mesh.data_ranks * strategy.micro_batch
    return Job(
        ranks=strategy.ranks,
        micro_batch=strategy.micro_batch,
        sequence=work.sequence_tokens,
        accumulation=accumulation,
        zero=strategy.zero,
        weight_bytes=4 if wide else 2,
        master_bytes=0 if wide or work.precision == "bf16-pure" else 4,
        gradient_bytes=4,
        frozen_bytes=NF4_BYTES if work.quantize == "nf4" else 4 if wide else 2,
        outer_frozen_bytes=4 if wide else 2,
        quantized=work.quantize == "nf4",
        state_bytes=2 * (1 + 4 / BLOCK) if in_blocks else 8,
        state_blocks=in_blocks,
        rounds_by_chance=work.precision == "bf16-pure",
        activation_bytes=4 if wide else 2,
        matmul="fp16_fast"
        if work.fp16_accumulation
        else work.precision
        if work.precision in ("fp32", "fp16", "fp8")
        else "bf16",
        recompute=strategy.recompute,
        kernels="compiled" if strategy.compile else "native" if ours else "eager",
        loss="fused" if ours else "unshifted",
        deepspeed=deepspeed,
        host_shards=host_shards,
        host_resident=host_resident,
        offload=frozenset(offload),
        nvme=strategy.on_nvme,
        reduce_every_micro_batch=(deepspeed or strategy.reduce_gradients == "every_micro_batch") and strategy.zero >= 2,
        expert=strategy.expert,
        pipeline=strategy.pipeline,
        context=strategy.context,
        tensor=strategy.tensor,
        flat_buffers=not deepspeed and not host_resident and (strategy.zero == 0 or strategy.ranks == 1),
        exact=not deepspeed,
        padding_share=1 - work.batch_sequences / rows,
    )
