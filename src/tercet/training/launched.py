"""Started by somebody else's launcher (torchrun, accelerate, deepspeed): this process is one rank already."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet.errors import InputError, TercetError
from tercet.parallel.bond import die_with_parent
from tercet.parallel.world import World, launch_variables, open_world
from tercet.planner.launcher_files.conflicts import conflicts
from tercet.planner.launcher_files.content import read_file
from tercet.probe.selftest import environment_for
from tercet.spec.recipe import Recipe, load_recipe, load_run_recipe
from tercet.spec.run_folder import RunFolder, open_run
from tercet.spec.strategy import Strategy
from tercet.training.failure import error_reports, first_error
from tercet.training.launcher import asked_by_launcher, contradictions, deepspeed_file, how_started, launcher_name
from tercet.training.rank import STACK_SIGNAL, leave_at_once, run_as_rank
from tercet.training.session import Asked, Session
from tercet.training.stop import Stop
from tercet.training.swap import Swap

GRACE_SECONDS = 5.0  # for the other ranks to write why they ended, after this one has failed


@dataclass(frozen=True)
class Ended:
    """How this rank ended. `run` is the folder to show: on rank 0 of a run that is finished, None elsewhere."""

    code: int
    run: Path | None = None


@dataclass(frozen=True)
class _Told:
    """What rank 0, which holds the session, tells the others."""

    run: str = ""
    finished: bool = False
    exit_code: int = 0
    repairs: dict[str, str] = field(default_factory=dict)


def run_launched(asked: Asked) -> Ended:
    """Run this rank. Rank 0 holds the session; its refusals end every rank. Raises TercetError on the rank that tells."""
    die_with_parent(os.getppid())
    stop = Stop(again=leave_at_once)
    stop.install()
    numbers = launch_variables()
    assert numbers is not None
    if asked.resume:
        recipe = load_run_recipe(open_run(asked.resume).recipe, asked.overrides)
    else:
        recipe = load_recipe(asked.recipe or "", asked.overrides)
    world = open_world(recipe.train.collective_timeout_seconds)
    places = world.gather((str(world.device), socket.gethostname()))
    if world.rank == 0:
        _say(how_started(launcher_name(), [d for d, _ in places], [h for _, h in places]))
    with ExitStack() as held:
        session, told, error = None, _Told(), None
        if world.rank == 0:
            try:
                with stop.at_once():
                    session, told = _open_session(asked, world, held)
            except TercetError as found:
                told, error = _Told(exit_code=found.exit_code), found
        told = world.meet(told)[0]  # rank 0 may have downloaded, planned and tested the cards
        if error is not None:
            raise error
        if told.exit_code or told.finished:
            return Ended(told.exit_code, Path(told.run) if told.finished and world.rank == 0 else None)
        # Before the first collective of the cards: NCCL reads its settings when it starts.
        os.environ.update(told.repairs)
        run = RunFolder(Path(told.run))
        return _run(asked, recipe, run, world, stop, session, [host for _, host in places])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _open_session(asked: Asked, world: World, held: ExitStack) -> tuple[Session, _Told]:
    session = Session(asked, _say, launcher_name(), world.size)
    if session.finished:
        return session, _Told(str(session.run.path), finished=True)
    _compare_with_launcher(session)
    held.enter_context(session)
    return session, _Told(str(session.run.path), repairs=environment_for(world.size, session.say))


def _run(
    asked: Asked,
    recipe: Recipe,
    run: RunFolder,
    world: World,
    stop: Stop,
    session: Session | None,
    hosts: Sequence[str],
) -> Ended:
    swap = Swap(run) if world.local_rank == 0 else None  # every machine has its own files
    try:
        pids = [pid if host == hosts[0] else None for pid, host in zip(world.gather(os.getpid()), hosts, strict=True)]
        if session is not None:
            session.hold(pids)
        _prepare_swap(swap, world)
        unwritten: list[dict[str, Any]] = []
        code = run_as_rank(
            recipe,
            run,
            world.rank,
            stop,
            lambda: world,
            unwritten.append,
            accept_changed_data=asked.accept_changed_data,
        )
    finally:
        if swap is not None:
            swap.remove()
    if code == 0:
        return Ended(0, run.path if world.rank == 0 else None)
    here = [pid if host == hosts[world.rank] else None for pid, host in zip(pids, hosts, strict=True)]
    error, teller = _why(run, here, unwritten)
    if teller == world.rank or session is not None:
        raise error
    return Ended(error.exit_code)


def _why(
    run: RunFolder, pids: Sequence[int | None], unwritten: Sequence[dict[str, Any]] = ()
) -> tuple[TercetError, int]:
    """Return why the ranks ended and which rank tells it: the lowest that has ended by itself.

    `unwritten`: this rank's own report, where the disk did not take it.
    A rank that writes nothing within the grace has not arrived where the others waited.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while len(reports := error_reports(run, len(pids))) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    told = {r["rank"] for r in reports}
    absent = [rank for rank in range(len(pids)) if rank not in told]
    for rank in absent:
        _ask_for_stack(pids[rank])
    if absent:
        time.sleep(0.5)  # for its answer to reach its log
    # Ranks whose disk is full leave no report at all; each knows its own, and rank 0 tells then.
    codes = [int(rank in told or not told) for rank in range(len(pids))]
    return first_error(run, codes, None, absent, unwritten), min(told, default=0)


def _ask_for_stack(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(OSError):  # it has gone
            os.kill(pid, STACK_SIGNAL)


def _prepare_swap(swap: Swap | None, world: World) -> None:
    """Prepare each machine's files on one of its ranks while the others wait; every rank raises what one raised."""
    error = None
    try:
        if swap is not None:
            swap.prepare(_say)
    except TercetError as found:
        error = found
    for found in world.meet(error):
        if found is not None:
            raise found


def _compare_with_launcher(session: Session) -> None:
    """Refuse a launcher's file that contradicts the recipe, key by key; say what of it does not count here."""
    recipe, strategy = session.recipe, Strategy(**session.plan["strategy"])
    differing = contradictions(asked_by_launcher(), strategy, recipe.train.precision)
    precision = differing.pop("train.precision", None)
    if precision is not None:
        session.say(
            f"mixed_precision is {precision[0]} in the launcher's file; the recipe counts: train.precision is {precision[1]}"
        )
    engine = differing.pop("strategy.engine", None)
    sentences = [
        f"{k} is {ours} in the recipe, {theirs} in the launcher's file" for k, (theirs, ours) in differing.items()
    ]
    changes = [f"{key}={theirs}" for key, (theirs, _) in differing.items()]
    if (file := deepspeed_file()) is not None:
        found = conflicts(read_file(file), recipe, strategy)
        sentences += [f"{file}: {c}" for c in found]
        changes += [c.override for c in found if c.override]
    if engine is not None:
        changes.insert(0, f"strategy.engine={engine[0]}")
    if sentences:
        if engine is not None:
            sentences.insert(0, f"strategy.engine is {engine[1]} in the recipe, the launcher's file is for {engine[0]}")
        raise InputError(
            "\n".join(sentences), f"Change the file, or follow it with: {shlex.join(dict.fromkeys(changes))}"
        )
    if engine is not None:
        session.say(f"the launcher's file asks for DeepSpeed; the recipe counts: engine {strategy.engine}")
