"""Weights in host memory: the native engine over parallel/host.py, block by block.

An update that a step decides on is *pending* when the step returns: each block is updated just before the next step's
forward fetches it. Whatever looks at the weights completes it first: evaluation, generation, a save, the end of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.engine import EngineSetup
from tercet.engine.adamw import RowAdamW
from tercet.engine.native import NativeEngine
from tercet.engine.optim import build_optimizer, scale_gradients
from tercet.engine.shards import Provider, Save
from tercet.model.build import make_buffers
from tercet.parallel.host import Group, HostLayout
from tercet.spec.strategy import Strategy


class HostEngine(NativeEngine):
    """Implements tercet.engine.Engine for strategy host."""

    layout: HostLayout

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        # One optimizer per group, over the one state that is saved and restored.
        self._steppers = {group.number: self._stepper(group, setup) for group in self.layout.groups if group.parts}

    def _build(self, strategy: Strategy, weights: Provider | None) -> HostLayout:
        module = self._empty_module()
        make_buffers(module, self.world.device)
        return HostLayout(module, self.spec, self.world, self._precision, lambda t: self._start(t, weights))

    def _stepper(self, group: Group, setup: EngineSetup) -> torch.optim.Optimizer:
        made = build_optimizer(group.parts, setup.optim, setup.seed)
        made.state = self.optimizer.state
        return made

    def _squares(self, parts: Sequence[Any]) -> Tensor:
        return self.layout.square_sum().cpu()  # added up block by block, beside backward

    def _apply(self, factor: float, lr: float) -> None:
        """Decide on the update; it is done group by group, ahead of the next forward."""

        updates = self._updates

        def step(group: Group) -> None:
            if not group.parts or self.world.host.type != "cpu":  # a rehearsal's host holds shapes only
                return
            if factor != 1.0:
                scale_gradients(group.parts, factor)
            stepper = self._steppers[group.number]
            for options in stepper.param_groups:
                options["lr"] = lr
            if isinstance(stepper, RowAdamW):
                stepper.updates = updates
            stepper.step()
            for part in group.parts:
                if part.value.grad is None:
                    self.optimizer.state[part.value]["step"] += 1

        self.layout.update(step)

    def save(self, folder: Path) -> Save:
        self.layout.complete()
        return super().save(folder)

    def load(self, folder: Path) -> list[str]:
        self.layout.complete()
        return super().load(folder)
