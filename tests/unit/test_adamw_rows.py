"""Moments in eight bits and weights in bf16 alone: against torch's AdamW, bitsandbytes' levels and float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tercet.engine.adamw import chance, fresh_state, round_by_chance
from tercet.engine.blocks import decode, encode, levels
from tercet.engine.optim import build_optimizer
from tercet.parallel.parameter_shard import ParameterShard
from tercet.spec.model import Tensor
from tercet.spec.optimizers.blocks import blocks_per_row, moment_bytes
from tercet.spec.placement import Region
from tercet.spec.recipe import OptimSection


@pytest.mark.slow  # the library takes ten seconds to import
@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_the_papers_own_library(signed):
    library = pytest.importorskip("bitsandbytes.functional")
    torch.testing.assert_close(levels(signed), library.create_dynamic_map(signed).float().cpu(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 64), (5, 256), (4, 300), (2, 3, 200), (1, 1000)])
def test_codes_are_near_and_stand_for_themselves(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(shape[0]).view(
        -1, *[1] * (len(shape) - 1)
    )
    for signed, values in ((True, x), (False, x.square())):
        codes, scales = encode(values, signed)
        assert scales.shape == (shape[0], blocks_per_row(shape))
        assert codes.numel() + 4 * scales.numel() == moment_bytes(shape, shape[0])
        back = decode(codes, scales, signed)
        largest = values.abs().flatten(1).amax(1).view(-1, *[1] * (len(shape) - 1))
        assert ((back - values).abs() <= 0.0075 * largest).all()  # half the widest gap between levels
        assert ((back == 0) == (values == 0)).all() or signed
        again = encode(back, signed)[0]
        assert (again == codes).float().mean() > 0.99


def test_a_second_moment_above_zero_never_becomes_zero():
    x = torch.full((1, 64), 1e-20)
    x[0, 0] = 1.0
    x[0, 1] = 0.0
    back = decode(*encode(x, False), False)
    assert back[0, 1] == 0 and (back[0, 2:] > 0).all()


def parts_of(values: dict[str, torch.Tensor], begin: int = 0) -> list[ParameterShard]:
    found = []
    for name, value in values.items():
        kind = "norm" if value.ndim == 1 else "matrix"
        description = Tensor(name, tuple(value.shape), ("a", "b")[: value.ndim], kind)
        found.append(ParameterShard(description, Region(begin, begin + value.shape[0], value.shape[0]), value))
    return found


def run(parts: list[ParameterShard], optim: OptimSection, gradients, steps: int) -> None:
    optimizer = build_optimizer(parts, optim, seed=5)
    for part in parts:
        optimizer.state[part.value] = fresh_state(part.value, optim.name == "adamw-8bit")
    for step in range(steps):
        for part in parts:
            part.value.grad = gradients(part, step)
        optimizer.updates = step
        optimizer.step()


def seeded(part: ParameterShard, step: int) -> torch.Tensor:
    g = torch.randn(40, *part.value.shape[1:], generator=torch.Generator().manual_seed(step))
    return g[part.region.slice]


# Other numbers than the recipe's own, and such that each of them decides.
SETTINGS = {"lr": 2e-2, "weight_decay": 0.1, "betas": (0.6, 0.8), "eps": 0.5}


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [("adamw", "float32", 1e-6), ("adamw-8bit", "float32", 2e-2), ("adamw", "bfloat16", 6e-3)],
)
def test_twenty_steps_lie_near_torchs(name, dtype, bound):
    start = torch.randn(40, 300, generator=torch.Generator().manual_seed(9))
    exact, ours = start.clone(), start.clone().to(getattr(torch, dtype))
    theirs = torch.optim.AdamW([exact], **SETTINGS)
    for step in range(20):
        exact.grad = seeded(parts_of({"w": exact})[0], step)
        theirs.step()
    run(parts_of({"w": ours}), OptimSection(name=name, **SETTINGS), seeded, 20)
    moved = (exact - start).norm()
    assert (ours.float() - exact).norm() / moved < bound + (0.2 if dtype == "bfloat16" else 0.0)
    assert ((ours.float() - exact).mean() / moved * start.numel() ** 0.5).abs() < bound


@pytest.mark.parametrize(("name", "dtype"), [("adamw", torch.float32), ("adamw-8bit", torch.float32)])
def test_scales_and_shifts_are_not_decayed(name, dtype):
    """Without gradients only decay moves a weight: by 1 - lr * decay each step, and those of norms and biases not."""
    kinds = {"matrix": 2, "expert": 3, "router": 2, "embedding": 2, "head": 2, "adapter": 2, "norm": 1, "bias": 1}
    parts = []
    for kind, axes in kinds.items():
        value = torch.ones((4, 3, 64)[:axes], dtype=dtype)
        description = Tensor(kind, tuple(value.shape), ("a", "b", "c")[:axes], kind)
        parts.append(ParameterShard(description, Region(0, 4, 4), value))
    run(parts, OptimSection(name=name, lr=0.1, weight_decay=0.5), lambda p, n: torch.zeros_like(p.value), 2)
    for part in parts:
        expected = 1.0 if part.name in ("norm", "bias") else (1 - 0.1 * 0.5) ** 2
        torch.testing.assert_close(part.value, torch.full_like(part.value, expected))


def test_chance_is_another_for_each_tensor_and_seed():
    """Tensors alike that rounded alike would drift together, and a repeated run would not try another seed."""

    def rounded(names: str, seed: int) -> list[torch.Tensor]:
        values = {name: torch.ones(8, 64, dtype=torch.bfloat16) for name in names}
        parts = parts_of(values)
        optimizer = build_optimizer(parts, OptimSection(lr=1e-3, weight_decay=0.0), seed)
        for part in parts:
            optimizer.state[part.value] = fresh_state(part.value, False)
            part.value.grad = torch.ones(8, 64)
        optimizer.step()
        return list(values.values())

    a, b = rounded("ab", 0)
    (again,), (other,) = rounded("a", 0), rounded("a", 1)
    assert torch.equal(a, again) and len(a.unique()) == 2
    assert not torch.equal(a, b) and not torch.equal(a, other)


def test_in_fp32_throughout_it_is_torchs():
    from tercet.engine.adamw import RowAdamW

    start = torch.randn(40, 70)
    theirs, ours = start.clone(), start.clone()
    run(parts_of({"w": theirs}), OptimSection(lr=1e-2), seeded, 10)
    parts = parts_of({"w": ours})
    optimizer = RowAdamW([{"params": [ours], "weight_decay": 0.1}], parts, 0, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    optimizer.state[ours] = fresh_state(ours, False)
    for step in range(10):
        ours.grad = seeded(parts[0], step)
        optimizer.updates = step
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [(0, 22, 40), (0, 14, 28, 40), (0, 1, 40)])
def test_any_cut_into_rows_gives_the_same_bits(cuts):
    start = torch.randn(40, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    optim = OptimSection(name="adamw-8bit", lr=1e-2)
    whole, pieces = start.clone(), [start[a:b].clone() for a, b in pairwise(cuts)]
    run(parts_of({"w": whole}), optim, seeded, 6)
    for begin, piece in zip(cuts, pieces, strict=False):
        run(parts_of({"w": piece}, begin), optim, seeded, 6)
    assert torch.equal(torch.cat(pieces), whole)


def test_rounding_by_chance_keeps_the_mean():
    x = torch.tensor([1.0, 1.001, 1.0039, -3.14159, 1e-8, 0.0, 65504.3])
    rounds = 4000
    sums = torch.zeros(len(x), dtype=torch.float64)
    for key in range(rounds):
        y = x.clone()
        round_by_chance(y, key * 7919, 0)
        assert torch.equal(y, y.bfloat16().float())
        sums += y.double()
    gap = x.double().abs() * 2**-7  # a bf16 number and its neighbour lie at most so far apart
    assert ((sums / rounds - x.double()).abs() <= 4 * gap / 2 / rounds**0.5 + 1e-12).all()
    assert sums[0] == rounds and sums[5] == 0


def test_random_numbers_are_even_and_differ_by_place_and_update():
    a, b = chance(1, 0, 1 << 16, torch.device("cpu")), chance(99991, 0, 1 << 16, torch.device("cpu"))
    for x in (a, b):
        assert int(x.min()) >= 0 and int(x.max()) < 1 << 16
        counts = torch.bincount(x >> 8, minlength=256).double()
        assert ((counts - 256).square() / 256).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi-squared
    stacked = torch.stack((a, b, a.roll(1))).double()
    correlation = torch.corrcoef(stacked)
    assert (correlation - torch.eye(3)).abs().max() < 0.02
    assert torch.equal(chance(1, 1000, 50, torch.device("cpu")), a[1000:1050])


def test_small_updates_are_not_lost_in_bf16_alone():
    """A09: 200 updates of 1e-4 on a weight of 1, each far below bf16's resolution there (2^-8)."""
    value = torch.ones(64, 64, dtype=torch.bfloat16)
    run(
        parts_of({"w": value}),
        OptimSection(lr=1e-4, weight_decay=0.0),
        lambda p, n: torch.ones_like(p.value).float(),
        200,
    )
    assert 1 - value.float().mean().item() == pytest.approx(0.02, rel=0.03)
