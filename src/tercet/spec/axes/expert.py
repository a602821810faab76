"""Expert parallel, described: each rank of the axis holds some experts; their rows are exchanged (all-to-all)."""

from __future__ import annotations

from tercet.spec.axes.split import balanced
from tercet.spec.axes.traffic import Collective
from tercet.spec.model import Model


def experts(model: Model) -> int | None:
    """Return the routed experts of a layer, or None for a dense model."""
    return next((n for layer in model.layers if (n := getattr(layer.feedforward, "experts", None))), None)


def legal(model: Model, size: int, data_ranks: int) -> list[str]:
    """Return the sentences that refuse `size`; `data_ranks` is data times shard, into which experts are folded."""
    if size == 1:
        return []
    count = experts(model)
    if count is None:
        return [f"strategy.expert: {size}, but {model.name or 'the model'} has no experts; it must be 1"]
    why = []
    if size > count:
        why.append(f"strategy.expert: {size} exceeds the model's {count} experts; at most {count}")
    if data_ranks % size:
        why.append(
            f"strategy.expert: {size} does not divide the {data_ranks} ranks that share the data; experts are dealt "
            f"among those, so it must be a divisor of {data_ranks}"
        )
    return why


def split(model: Model, size: int) -> tuple[int, ...]:
    """Return the experts of each rank: 64 over 3 is 22, 21, 21."""
    return balanced(experts(model) or 0, size)


def traffic(model: Model) -> list[Collective]:
    """Return the sum over ranks of the tokens sent to each expert, once per step (model/balance.py): fp64 numbers."""
    blocks = (block for _, block in model.blocks())
    numbers = sum(getattr(getattr(block, "feedforward", None), "experts", 0) for block in blocks)
    return [Collective("all_reduce", "counts", 1, 8 * numbers)] if numbers else []
