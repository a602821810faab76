"""Start the ranks, watch them, tell the first real error, leave no process behind. Loads no torch.

Why not torch's elastic agent: docs/decisions/0003. `tercet train` also runs under torchrun (training/launched.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tercet.errors import InputError, InterruptedRun, NotLegalError, TercetError
from tercet.spec.families import describe
from tercet.spec.recipe import Recipe, load_recipe
from tercet.spec.run_folder import RunFolder, open_run, read_json
from tercet.spec.strategy import Work, not_built, why_not
from tercet.training.lock import RunLock
from tercet.training.swap import Swap
from tercet.units import show_bytes
from tercet.weights.hub import ensure_here

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for the other ranks to tell what they know, after one has failed
FIXED_ON_RESUME = ("model", "data", "train.seed", "train.batch_sequences", "adapter")


def train(
    recipe_name: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    output: str | None = None,
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
    watch: tuple[int, int] | None = None,
) -> Path:
    """Train a recipe and return the run folder. Raises TercetError (its exit_code says which kind).

    `watch`: (first, count) of steps during which rank 0 looks at its collectives, for tercet bench.
    """
    recipe = load_recipe(recipe_name, overrides)
    plan = make_plan(recipe, ranks, say)
    run = new_run(recipe, output)
    lock = RunLock(run.lock)
    try:
        write_run(run, recipe, plan)
        say(f"run folder: {run.path}")
        _run_to_the_end(run, plan["strategy"]["ranks"], lock, restarts, say, watch)
    finally:
        lock.release()
        leave_report(run, say)
    return run.path


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Continue a run from its newest complete checkpoint; a finished run says so and is left alone."""
    run = open_run(folder)
    before = load_recipe(run.recipe)
    recipe = load_recipe(run.recipe, overrides)
    changes = changed_keys(before, recipe)
    refuse_changes(changes)
    summary = run.read_summary()
    if summary is not None and summary.get("finished") and not changes:
        say(f"{run.path} is finished: {summary['steps']} steps; nothing to resume")
        return run.path
    plan_before = run.read_plan() or {}
    if ranks is None:
        ranks = plan_before.get("strategy", {}).get("ranks")
    plan = make_plan(recipe, ranks, say)
    lock = RunLock(run.lock)
    try:
        for key, (old, new) in changes.items():
            say(f"changed: {key}: {old} -> {new}")
        write_run(run, recipe, plan)
        run.summary.unlink(missing_ok=True)
        _run_to_the_end(run, plan["strategy"]["ranks"], lock, restarts, say)
    finally:
        lock.release()
        leave_report(run, say)
    return run.path


def leave_report(run: RunFolder, say: Callable[[str], None]) -> None:
    """Write report.html, of a finished run or of one that was stopped; failing at it does not fail the run."""
    from tercet.report.page import write_report

    if not run.events.exists():
        return
    try:
        write_report(run)
    except (OSError, TercetError) as error:
        say(f"the report could not be written ({error}); later: tercet report {run.path}")


# ------------------------------------------------------------------------------------------- before the ranks


def make_plan(recipe: Recipe, ranks: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Return plan.json's content for this machine. Raises NotLegalError with every reason why it cannot run."""
    from tercet.planner.answer import plan_for_run

    if why := not_built(recipe):
        raise NotLegalError(why)
    ensure_here(recipe.model, say)
    model, work = describe(recipe.model), Work.of(recipe)
    wanted = recipe.strategy.data
    if ranks is not None and wanted not in ("auto", ranks):
        raise NotLegalError(
            [f"strategy.data is {wanted} but {ranks} rank{'s were' if ranks > 1 else ' was'} started"],
            f"Start {wanted}, or set strategy.data={ranks}.",
        )
    plan, strategy = plan_for_run(recipe, ranks)
    if why := why_not(model, strategy, work):
        raise NotLegalError(why)
    if strategy.engine == "deepspeed":
        from tercet.engine.deepspeed.installed import require_deepspeed

        require_deepspeed()
    accumulation = strategy.accumulation(work.batch_sequences)
    say(
        f"{strategy.name} on {strategy.ranks} rank{'s' if strategy.ranks > 1 else ''}: micro-batch "
        f"{strategy.micro_batch} x accumulation {accumulation} x ranks {strategy.ranks}; effective batch "
        f"{work.batch_sequences} sequences ({work.batch_sequences * work.sequence_tokens} tokens)"
    )
    if idle := strategy.idle_rows(work.batch_sequences):
        from tercet.spec.strategy import nearest_batches

        below, above = nearest_batches(strategy, work.batch_sequences)
        say(
            f"{idle} of {idle + work.batch_sequences} places in each step hold no sequence (the loss is weighted "
            f"exactly); train.batch_sequences {below} or {above} would leave none empty"
        )
    return plan


def new_run(recipe: Recipe, output: str | None) -> RunFolder:
    """Make and return the folder of a new run. Raises InputError when it holds a run already."""
    wanted = output or recipe.output.folder
    if wanted is not None:
        run = RunFolder(Path(wanted).expanduser().absolute())
        if any(path.exists() for path in (run.recipe, run.events, run.checkpoints)):
            raise InputError(
                f"{run.path} holds a run already", f"Continue it with: tercet train --resume {wanted}; or give another."
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output.folder {run.path} cannot be made: {error.strerror}") from None
        return run
    base, number = Path("runs").absolute(), 1
    name = re.sub(r"[^\w.-]+", "-", recipe.name)
    while True:
        run = RunFolder(base / f"{name}-{number}")
        try:
            run.path.mkdir(parents=True)
            return run
        except FileExistsError:
            number += 1


def write_run(run: RunFolder, recipe: Recipe, plan: dict[str, Any]) -> None:
    from tercet.training.record import write_json

    write_json(run.plan, plan)
    temporary = run.path / ".recipe.tmp"
    temporary.write_text(recipe.to_yaml(), encoding="utf-8")
    temporary.replace(run.recipe)


def changed_keys(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (old, new) for every value that differs."""
    found: dict[str, tuple[Any, Any]] = {}

    def walk(old: Any, new: Any, key: str) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            for name in {**old, **new}:
                walk(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        elif old != new:
            found[key] = (old, new)

    walk(before.model_dump(mode="json"), after.model_dump(mode="json"), "")
    return found


def refuse_changes(changes: dict[str, tuple[Any, Any]]) -> None:
    fixed = [k for k in changes if any(k == f or k.startswith(f"{f}.") for f in FIXED_ON_RESUME)]
    if fixed:
        sentences = [f"{k} was {changes[k][0]} and would be {changes[k][1]}" for k in fixed]
        raise InputError(
            "a resumed run cannot change " + "; ".join(sentences),
            "Model, data, seed and effective batch decide what the run is. Start a new run for that.",
        )


# ------------------------------------------------------------------------------------------------- the ranks


def _run_to_the_end(
    run: RunFolder,
    ranks: int,
    lock: RunLock,
    restarts: int,
    say: Callable[[str], None],
    watch: tuple[int, int] | None = None,
) -> None:
    swap = Swap(run)
    for attempt in range(restarts + 1):
        try:
            swap.prepare(say)
            _Ranks(run, ranks, lock, say, watch).wait()
            return
        except TercetError as error:
            if error.exit_code != 1 or attempt == restarts:
                raise
            say(f"{error}\nrestart {attempt + 1} of {restarts}")
        finally:
            swap.remove()


class _Ranks:
    """The processes of one start. The first signal is passed on to them, the second ends them."""

    def __init__(
        self,
        run: RunFolder,
        ranks: int,
        lock: RunLock,
        say: Callable[[str], None],
        watch: tuple[int, int] | None = None,
    ):
        from tercet.probe.selftest import environment_for

        self._run, self._asked, self._watched = run, 0, watch
        self._repairs = environment_for(ranks, say)  # on cards whose peer access lies or hangs
        self._ended_here: set[int] = set()  # ranks that did not end by themselves after another had failed
        run.logs.mkdir(parents=True, exist_ok=True)
        for old in run.logs.glob("error-rank-*.json"):
            old.unlink()
        self._meeting = tempfile.TemporaryDirectory(prefix="tercet-")
        self._handlers = {n: signal.signal(n, self._signal) for n in (signal.SIGINT, signal.SIGTERM)}
        self._started = time.time()
        self._ranks = [self._start(rank, ranks) for rank in range(ranks)]
        lock.ranks([p.pid for p in self._ranks])

    def _start(self, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._repairs}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        # Without this every rank starts a thread per core and they take turns pushing each other off.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        command = [sys.executable, "-m", "tercet.training.rank", str(self._run.path), f"{self._meeting.name}/store"]
        if self._watched is not None and rank == 0:
            command.append("{}:{}".format(*self._watched))
        # A session of their own: Ctrl-C in the terminal reaches the supervisor alone, which passes it on once.
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _signal(self, number: int, frame: Any) -> None:
        self._asked += 1
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def wait(self) -> None:
        """Return when all ranks have ended well. Raises the first real error otherwise; no rank is left."""
        try:
            self._watch()
        finally:
            for rank, process in enumerate(self._ranks):
                if process.poll() is None:
                    self._ended_here.add(rank)
                    process.kill()
                process.wait()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._meeting.cleanup()
        codes = [p.returncode for p in self._ranks]
        if any(codes):
            raise self._error(codes)

    def _watch(self) -> None:
        failed_at = None
        while any(p.poll() is None for p in self._ranks):
            time.sleep(POLL_SECONDS)
            ended_badly = [p for p in self._ranks if p.poll()]
            if not ended_badly:
                continue
            if failed_at is None:
                failed_at = time.monotonic()
                self._ask_for_stacks()
            elif time.monotonic() - failed_at > GRACE_SECONDS:
                return

    def _ask_for_stacks(self) -> None:
        """Have the ranks that still run write where they are into their logs: one of them may never have arrived."""
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def _error(self, codes: list[int]) -> TercetError:
        """Return the first real error: not the broken collectives that it caused on the other ranks."""
        reports = []
        for rank in range(len(codes)):
            path = self._run.logs / f"error-rank-{rank}.json"
            if path.exists():
                reports.append(read_json(path))
        stopped = [r for r in reports if r["interrupted"]]
        own = sorted((r for r in reports if not r["echo"] and not r["interrupted"]), key=lambda r: r["time"])
        if own:
            return _from_report(own[0], self._run)
        if self._asked or stopped:
            return InterruptedRun(stopped[0]["message"] if stopped else "stopped on request")
        killed = [(rank, -code) for rank, code in enumerate(codes) if code < 0 and rank not in self._ended_here]
        if killed:
            return _killed(*killed[0], self._run)
        echoes = [r for r in reports if r["echo"]]
        if echoes and self._ended_here:  # the others waited for ranks that never came
            return self._absent(sorted(self._ended_here), echoes[0])
        if echoes:
            return _from_report(echoes[0], self._run)
        rank = next(rank for rank, code in enumerate(codes) if code)
        return TercetError(f"rank {rank} ended with code {codes[rank]}", f"Its log: {self._run.log_of(rank)}")

    def _absent(self, ranks: list[int], echo: dict[str, Any]) -> TercetError:
        names = ", ".join(map(str, ranks))
        stack = "\n".join(last_stack(self._run.log_of(ranks[0])))
        return TercetError(
            f"rank {names} did not arrive where the others waited (step {echo['step']}): {echo['message']}\n"
            f"rank {ranks[0]} was here:\n{stack}",
            f"Logs: {self._run.logs}",
        )


def last_stack(log: Path, lines: int = 12) -> list[str]:
    """Return the newest stack that faulthandler wrote into a rank's log."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    begin = next((i for i in range(len(text) - 1, -1, -1) if text[i].startswith("Current thread")), None)
    return text[begin : begin + lines] if begin is not None else ["(no stack in its log)"]


def _from_report(report: dict[str, Any], run: RunFolder) -> TercetError:
    where = ""
    if report["exit_code"] == 1:
        rows = ", ".join(map(str, report["rows"]))
        where = f"rank {report['rank']}, step {report['step']}" + (f", rows {rows}" if rows else "") + ": "
    hint = report["hint"] or f"Its log: {run.log_of(report['rank'])}"
    error = TercetError(where + report["message"], hint)
    error.exit_code = report["exit_code"]
    return error


def _killed(rank: int, number: int, run: RunFolder) -> TercetError:
    name = signal.Signals(number).name
    text = f"rank {rank} was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        memory = psutil.virtual_memory()
        text += (
            "; if you did not do that, it was probably the kernel, for want of host RAM "
            f"({show_bytes(memory.total)} in this machine, {show_bytes(memory.available)} available now)"
        )
    return TercetError(text, f"Continue with: tercet train --resume {run.path}. Its log: {run.log_of(rank)}")
