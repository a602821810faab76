"""G63: whatever the processor can do, an engine holds the formats that its recipe means, or refuses to start.

tests/distributed/test_deepspeed_nvme.py (slow) trains with weights in files, where the given format was dropped.
"""

from __future__ import annotations

import pytest
import torch

from tercet.engine.native import NativeEngine
from tercet.errors import NotLegalError
from tercet.parallel.world import World
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import tiny_engine, tiny_model, tiny_strategy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StandIn:
    """The accelerator that is there, but for what it says of fp16."""

    def __init__(self, real, fp16: bool):
        self._real, self._fp16 = real, fp16

    def __getattr__(self, name):
        return getattr(self._real, name)

    def is_fp16_supported(self) -> bool:
        return self._fp16


def formats_of_deepspeed(world: World, fp16: bool, precision: str) -> set:
    """Return the formats of a stage 3 engine's weights, and of what would write them into files."""
    from deepspeed.runtime.zero import partition_parameters

    from tercet.engine.deepspeed import engine as module

    inits = []

    def watched(*arguments, **how):
        inits.append(zero_init(*arguments, **how))
        return inits[-1]

    real, zero_init = partition_parameters.get_accelerator, module.zero_init
    partition_parameters.get_accelerator, module.zero_init = lambda: StandIn(real(), fp16), watched
    try:
        engine = engine_of(world, layout("zero3", 1, 2), 2, precision, tiny_model())
    finally:
        partition_parameters.get_accelerator, module.zero_init = real, zero_init
    assert inits
    return {i.dtype for i in inits} | {p.ds_tensor.dtype for p in engine.module.parameters()}


@needs_deepspeed
@pytest.mark.parametrize("fp16", [True, False])
@pytest.mark.parametrize("precision", DTYPES)
def test_deepspeed_builds_what_it_is_told_with_and_without_fp16(pools, fp16, precision):
    (formats,) = pools[1].run(formats_of_deepspeed, fp16, precision)
    assert formats == {DTYPES[precision]}


def refused(world: World, which: str) -> str:
    """Return how an engine refuses in which one tensor came out in another format than was asked for."""
    if which == "native":
        kind, verb = NativeEngine, "_make_moments"
    else:
        from tercet.engine.deepspeed.engine import DeepSpeedEngine

        kind, verb = DeepSpeedEngine, "_initialize"
    built = getattr(kind, verb)

    def other(self, *arguments, **keywords):
        found = built(self, *arguments, **keywords)
        if which == "native":
            value = self.layout.parts[3].value
            self.optimizer.state[value]["exp_avg"] = torch.zeros_like(value, dtype=torch.float16)
        else:
            weight = self.module.model.embed_tokens.weight
            weight.data = weight.data.to(torch.bfloat16)
        return found

    setattr(kind, verb, other)
    try:
        if which == "native":
            tiny_engine(world, tiny_strategy("ddp", 1, 2))
        else:
            engine_of(world, layout("zero1", 1, 2), 2, "fp32", tiny_model())
    except NotLegalError as error:
        return str(error)
    finally:
        setattr(kind, verb, built)
    return ""


@pytest.mark.parametrize("which", ["native", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_another_format_than_was_meant_is_refused_by_name(pools, which):
    (words,) = pools[1].run(refused, which)
    assert "train.precision is fp32" in words and f"the engine {which} has built the" in words
    assert {"native": "in float16 where float32", "deepspeed": "in bfloat16 where float32"}[which] in words
