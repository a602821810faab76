"""What a layer's forward leaves alive for its backward, counted in storages: under every recompute level alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Remembers every storage that operators make, without keeping it alive."""

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()
        self._outside = {t.untyped_storage()._cdata for t in outside}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata in self._outside:
                    continue
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        """Return the bytes of those that something still holds."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def kept_bytes(
    layer: nn.Module, inputs: list[Tensor], shared: Iterable[Tensor], run: Callable[..., Tensor | tuple]
) -> int:
    """Return the bytes alive between forward and backward of `run(layer, *inputs)`; inputs count where kept.

    `shared` are tensors that all layers read (the rotary table); they and the parameters do not count.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Storages([*leaves, *shared, *layer.parameters(), *layer.buffers()]) as storages:
        made = [x * 1.0 for x in leaves]
        out = run(layer, *made)
        out = out if isinstance(out, tuple) else (out,)
        graph = [x.grad_fn for x in out if x is not None and x.grad_fn is not None]
        made.clear()
        del out
        alive = storages.alive()
        assert graph
    return alive
