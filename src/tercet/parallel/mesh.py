"""A Strategy's mesh as process groups. Twin of spec/mesh.py.

An axis of one rank has no group: sums over it are the identity. Axes that hold all ranks use the group that is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tercet.parallel.world import World
from tercet.spec.mesh import AXES, ROWS, TOKENS, Mesh


def lay_out(world: World, mesh: Mesh) -> World:
    """Return the world with its ranks on the mesh. Every rank must call it; raises ValueError when sizes differ."""
    if mesh == world.mesh:
        return world
    if mesh.ranks != world.size:
        raise ValueError(f"a mesh of {mesh.ranks} ranks cannot be laid over {world.size}")
    groups = {}
    for axes in (*((axis,) for axis in AXES), ("expert",), ROWS, TOKENS):
        if 1 < mesh.size(axes) < world.size:
            groups[axes] = _own_group(world.rank, mesh.groups(axes))
    return replace(world, mesh=mesh, groups=groups)


def _own_group(rank: int, groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
    own: dist.ProcessGroup | None = None
    for ranks in groups:  # every rank takes part in making every group
        made = dist.new_group(list(ranks))
        if isinstance(made, dist.ProcessGroup) and rank in ranks:
            own = made
    if own is None:
        raise ValueError(f"rank {rank} is in none of the groups {list(groups)}")
    return own


def device_mesh(world: World, axis: str) -> DeviceMesh:
    """Return one axis in the form that PyTorch's own sharding wants."""
    group = world.group((axis,))
    if group is None:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=(axis,))
    return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=(axis,))
