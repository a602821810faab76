"""Started by somebody else's launcher (torchrun, accelerate): this process is one rank already."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tercet.errors import InputError, TercetError
from tercet.parallel.world import World, launch_variables, open_world
from tercet.spec.recipe import Recipe, load_recipe
from tercet.spec.run_folder import RunFolder, open_run
from tercet.spec.strategy import Strategy
from tercet.training.launcher import asked_by_launcher, contradictions, how_started, launcher_name
from tercet.training.lock import RunLock
from tercet.training.rank import die_with_parent, run_as_rank
from tercet.training.stop import Stop
from tercet.training.supervise import changed_keys, leave_report, make_plan, new_run, refuse_changes, write_run
from tercet.training.swap import Swap


def run_launched(recipe_name: str | None, overrides: Sequence[str], output: str | None, resume: str | None) -> int:
    """Run this rank and return its exit code. Rank 0 makes the folder and tells the others."""
    die_with_parent()
    stop = Stop()
    stop.install()
    numbers = launch_variables()
    assert numbers is not None
    recipe = load_recipe(open_run(resume).recipe if resume else recipe_name or "", overrides)
    world = open_world(recipe.train.collective_timeout_seconds)
    outcome: tuple[Path | None, TercetError | None] = (None, None)
    lock = None
    places = world.gather((str(world.device), socket.gethostname()))
    if world.rank == 0:
        print(how_started(launcher_name(), [d for d, _ in places], [h for _, h in places]), flush=True)
        try:
            run, lock = _set_up(recipe, world, overrides, output, resume)
            outcome = (run.path, None)
        except TercetError as error:
            outcome = (None, error)
    path, error = world.gather(outcome)[0]
    if error is not None or path is None:
        if world.rank == 0 and error is not None:
            raise error
        return error.exit_code if error else 1
    swap = Swap(RunFolder(path)) if world.local_rank == 0 else None  # every machine has its own files
    try:
        pids = world.gather(os.getpid())
        if lock is not None:
            lock.ranks(pids)
        _prepare_swap(swap, world)
        return run_as_rank(recipe, RunFolder(path), world.rank, stop, lambda: world)
    finally:
        if swap is not None:
            swap.remove()
        if lock is not None:
            lock.release()
            leave_report(RunFolder(path), print)


def _prepare_swap(swap: Swap | None, world: World) -> None:
    """Prepare each machine's files on one of its ranks while the others wait; every rank raises what one raised."""
    error = None
    try:
        if swap is not None:
            swap.prepare(lambda text: print(text, flush=True))
    except TercetError as found:
        error = found
    for found in world.gather(error):
        if found is not None:
            raise found


def _set_up(
    recipe: Recipe, world: World, overrides: Sequence[str], output: str | None, resume: str | None
) -> tuple[RunFolder, RunLock]:
    def say(text: str) -> None:
        print(text, flush=True)

    plan = make_plan(recipe, world.size, say)
    _compare_with_launcher(recipe, plan, say)
    if resume is not None:
        run = open_run(resume)
        refuse_changes(changed_keys(load_recipe(run.recipe), recipe))
    else:
        run = new_run(recipe, output)
    lock = RunLock(run.lock)
    write_run(run, recipe, plan)
    say(f"run folder: {run.path}")
    return run, lock


def _compare_with_launcher(recipe: Recipe, plan: dict[str, Any], say: Callable[[str], None]) -> None:
    """Refuse a launcher's file that contradicts a DeepSpeed recipe; where only the recipe acts, say so."""
    strategy = Strategy(**plan["strategy"])
    differing = contradictions(asked_by_launcher(), strategy, recipe.train.precision)
    precision = differing.pop("train.precision", None)
    if precision is not None:
        say(
            f"mixed_precision is {precision[0]} in the launcher's file; the recipe counts: train.precision is {precision[1]}"
        )
    if not differing:
        return
    change = " ".join(f"{key}={theirs}" for key, (theirs, _) in differing.items())
    if strategy.engine == "deepspeed":
        sentences = [
            f"{k} is {ours} in the recipe, {theirs} in the launcher's file" for k, (theirs, ours) in differing.items()
        ]
        raise InputError("; ".join(sentences), f"Change the file, or follow it with: {change}")
    say(
        f"the launcher's file asks for DeepSpeed; the recipe counts: engine {strategy.engine} "
        f"(follow the file with: {change})"
    )
