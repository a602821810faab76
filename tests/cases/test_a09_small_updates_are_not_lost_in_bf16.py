"""A09: bf16 training keeps fp32 masters, so updates below bf16's resolution add up; so does weight decay."""

from __future__ import annotations

import pytest
import torch

from tercet.engine.optim import build_optimizer
from tercet.parallel.data import Replicated
from tercet.parallel.parameter_shard import ParameterShard
from tercet.parallel.precision import PRECISIONS
from tercet.parallel.world import World
from tercet.spec.model import Tensor
from tercet.spec.recipe import OptimSection

ALONE = World(0, 1, 0, torch.device("cpu"))


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))


class Spec:
    frozen = None

    def tensors(self):
        return (Tensor("weight", (4, 4), ("a", "b"), "matrix"),)


def move(precision: str, gradient: float, decay: float) -> float:
    layout = Replicated(OneWeight(), Spec(), ALONE, PRECISIONS[precision])
    optimizer = build_optimizer(layout.parts, OptimSection(lr=1e-4, weight_decay=decay))
    for _ in range(200):
        layout.begin_step()
        layout.begin_micro_batch(True)
        (layout.module.weight.float().sum() * gradient).backward()
        layout.finish_gradients()
        optimizer.step()
        layout.after_update()
    part: ParameterShard = layout.parts[0]
    assert layout.module.weight.dtype == PRECISIONS[precision].compute
    torch.testing.assert_close(layout.module.weight.float(), part.value, rtol=2**-8, atol=0)
    return 1.0 - part.value.mean().item()


@pytest.mark.parametrize(("gradient", "decay"), [(1.0, 0.0), (0.0, 0.5)])
def test_moves_as_in_fp32(gradient, decay):
    expected = move("fp32", gradient, decay)
    assert expected > 5e-3
    assert move("bf16", gradient, decay) == pytest.approx(expected, rel=0.02)


def test_a_step_alone_would_vanish_in_bf16():
    one = torch.ones((), dtype=torch.bfloat16)
    assert one - 1e-4 == one
