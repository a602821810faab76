"""The mesh: rank order by the contract, and who shares rows; sums over one axis leave the others alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.tiny import micro_batches, tiny_engine, tiny_model, whole_weights

from tercet.parallel.mesh import lay_out
from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.spec.mesh import ROWS, TOKENS, Mesh
from tercet.spec.recipe import StrategySection, load_recipe
from tercet.spec.strategy import Strategy, Work, not_built, ranks_of, resolve

SIZES = [{"data": 3}, {"shard": 2, "tensor": 2}, {"pipeline": 2, "data": 2, "shard": 3, "context": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_count_with_tensor_fastest_and_pipeline_slowest(sizes):
    mesh = Mesh(**sizes)
    order = [range(sizes.get(axis, 1)) for axis in ("pipeline", "data", "shard", "context", "tensor")]
    places = list(product(*order))  # the last one varies fastest
    assert mesh.ranks == len(places)
    for rank, place in enumerate(places):
        assert tuple(mesh.position(rank)[a] for a in ("pipeline", "data", "shard", "context", "tensor")) == place


def test_groups_differ_along_their_axes_alone():
    mesh = Mesh(pipeline=2, shard=3, tensor=2)
    assert mesh.groups(["tensor"]) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert mesh.groups(["shard"]) == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert mesh.groups(["pipeline"]) == [(n, n + 6) for n in range(6)]
    assert mesh.groups(["pipeline", "shard", "tensor"]) == [tuple(range(12))]


def test_experts_are_folded_into_the_data_ranks():
    mesh = Mesh(data=2, shard=2, tensor=2, expert=2)
    assert mesh.ranks == 8
    assert mesh.groups(["expert"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]  # the same tensor part, other rows
    with pytest.raises(ValueError, match="3 expert ranks do not divide 4 data ranks"):
        Mesh(data=2, shard=2, expert=3).groups(["expert"])


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"tensor": 2, "pipeline": 2}])
def test_a_step_computes_the_batch_whatever_the_axes(zero, axes):
    """Tensor, pipeline and context ranks share rows: they must not count as ranks that divide the batch."""
    work = Work(16, 24)
    strategy = Strategy(zero=zero, ranks=12, micro_batch=1, **axes)
    data_ranks = 12
    for size in axes.values():
        data_ranks //= size
    assert strategy.mesh.data_ranks == data_ranks
    assert strategy.accumulation(24) * data_ranks == 24
    assert strategy.idle_rows(24) == 0
    assert of_strategy(strategy, work).step_tokens == 24 * 16
    auto = resolve(StrategySection(zero=zero, **axes), 12, work, micro_batch_tokens=10**6)
    assert auto.micro_batch * data_ranks == 24


def test_data_counts_replicas(tmp_path):
    """`strategy.data` is copies of the model: whole ones fix the ranks, copies in shards take all that is there."""
    assert ranks_of(StrategySection(zero=0, data=2, tensor=2), 8) == 4
    assert ranks_of(StrategySection.model_validate("single"), 3) == 1
    assert ranks_of(StrategySection(zero=3, data=1), 3) == 3
    assert ranks_of(StrategySection(), 3) == 3
    for section, mesh in (
        (StrategySection(data=2), Mesh(data=2)),
        (StrategySection(zero=3, data=1), Mesh(shard=3)),
        (StrategySection(zero=2), Mesh(shard=3)),
        (StrategySection(zero=0), Mesh(data=3)),
    ):
        assert resolve(section, ranks_of(section, 3), Work(16, 12)).mesh == mesh
    (tmp_path / "r.yaml").write_text("model: {preset: llama-3.2-1b}\ndata: {train: x.txt}\n")
    recipe = load_recipe(tmp_path / "r.yaml", ["strategy=zero3", "strategy.data=2"])
    (why,) = not_built(recipe)
    assert "strategy.data: 2 replicas" in why and "leave strategy.data out" in why


def sums(world: World, sizes: dict) -> dict:
    world = lay_out(world, Mesh(**sizes))
    one = torch.tensor([float(world.rank + 1)])
    return {
        "rank": world.data_rank,
        **{axes: world.sum(one.clone(), axes).item() for axes in (("tensor",), ("shard",), ROWS, TOKENS)},
        "gathered": world.gather(world.rank, ROWS),
        "all": world.sum(one.clone()).item(),
    }


def test_an_axis_of_all_ranks_leaves_the_others_alone(pools):
    at = pools[3].run(sums, {"tensor": 3})
    assert [a["rank"] for a in at] == [0, 0, 0]
    assert [a[("tensor",)] for a in at] == [6, 6, 6]
    assert [a[TOKENS] for a in at] == [1, 2, 3]
    assert [a["gathered"] for a in at] == [[0], [1], [2]]


@pytest.mark.slow
def test_sums_go_over_their_axes_alone(pools):
    at = pools[4].run(sums, {"shard": 2, "tensor": 2})
    assert [a["rank"] for a in at] == [0, 0, 1, 1]
    assert [a[("tensor",)] for a in at] == [3, 3, 7, 7]
    assert [a[("shard",)] for a in at] == [a[ROWS] for a in at] == [4, 6, 4, 6]
    assert [a["gathered"] for a in at] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [a["all"] for a in at] == [10] * 4


def train(world: World, zero: int, tensor: int):
    strategy = Strategy(zero=zero, ranks=world.size, tensor=tensor, micro_batch=1)
    engine = tiny_engine(world, strategy, model=tiny_model())
    data_rank, data_ranks = engine.world.data_rank, engine.world.mesh.data_ranks
    results = [engine.step(micro_batches(s, data_rank, data_ranks, 1, 5), 1e-2) for s in range(2)]
    return results, whole_weights(engine)


@pytest.mark.parametrize(
    ("zero", "data_ranks", "tensor"), [(0, 1, 3), *(pytest.param(z, 2, 2, marks=pytest.mark.slow) for z in (0, 3))]
)
def test_ranks_that_share_rows_count_them_once(pools, zero, data_ranks, tensor):
    """Ranks of one tensor group hold and compute the same here: losses, norms and weights are those of one of them."""
    expected = pools[data_ranks].run(train, zero, 1)[0]
    for results, weights in pools[data_ranks * tensor].run(train, zero, tensor):
        assert results == expected[0]
        assert all(torch.equal(weights[name], value) for name, value in expected[1].items())
