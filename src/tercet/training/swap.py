"""What a strategy keeps on NVMe: the folder of its files, and what must be there before the ranks start."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tercet.engine.deepspeed.async_io import ensure_built, require_direct_files
from tercet.errors import InputError
from tercet.spec.recipe import Recipe, load_run_recipe
from tercet.spec.run_folder import RunFolder
from tercet.spec.strategy import Strategy
from tercet.training.record import preparation_bar
from tercet.units import show_bytes


def swap_folder(recipe: Recipe, run: RunFolder) -> Path:
    """Return the run's own folder for files of optimizer and weights: two runs may name one drive."""
    wanted = recipe.strategy.offload.nvme_path
    if wanted is None:
        return run.path / "swap"
    key = hashlib.blake2b(str(run.path).encode(), digest_size=4).hexdigest()
    return Path(wanted).expanduser().absolute() / f"{run.path.name}-{key}"


class Swap:
    """The files of one run on this machine; nothing when its strategy keeps none."""

    def __init__(self, run: RunFolder):
        plan = run.read_plan() or {}
        self._folder = swap_folder(load_run_recipe(run.recipe), run) if Strategy(**plan["strategy"]).on_nvme else None
        self._needed_bytes = plan["disk"].get("swap", 0)

    def prepare(self, say: Callable[[str], None]) -> None:
        """Have the library built, the folder empty and room in it. Raises InputError that says what is missing."""
        if self._folder is None:
            return

        with preparation_bar(Console(stderr=True)) as bar:
            ensure_built(say, bar)
        self.remove()  # what a killed start has left
        require_direct_files(self._folder)
        free = shutil.disk_usage(self._folder).free
        if free < self._needed_bytes:
            raise InputError(
                f"strategy.offload.nvme_path: {self._folder} has {show_bytes(free)} free, "
                f"{show_bytes(self._needed_bytes)} are needed",
                "Free some, name another drive, or keep the state in host memory: strategy.offload.optimizer=cpu",
            )

    def remove(self) -> None:
        """Remove the files: once the ranks have ended they are worth nothing; checkpoints are elsewhere."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
