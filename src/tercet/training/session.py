"""One session of a run, whoever starts its ranks: from the first check to the report. Loads no torch.

`tercet train`, `--resume` and somebody else's launcher (training/launched.py) all go through it, so what one of them
checks or refuses, all do.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tercet.errors import CardFullError, InputError, InterruptedRun, NotLegalError, file_error
from tercet.spec.recipe import Recipe, load_recipe, load_run_recipe
from tercet.spec.run_folder import RunFolder, open_run
from tercet.training.lock import RunLock
from tercet.training.preflight import (
    check_files,
    check_output,
    check_tokenizer,
    make_plan,
    with_smaller_micro_batch,
)
from tercet.training.warned import WARNED
from tercet.units import show_bytes

FIXED_ON_RESUME = ("model", "data", "train.seed", "train.batch_sequences", "train.freeze", "adapter")


@dataclass(frozen=True)
class Asked:
    """What a command line asks for: a new run of `recipe`, or the run `resume`."""

    recipe: str | Path | None = None
    overrides: Sequence[str] = ()
    output: str | None = None
    resume: str | Path | None = None
    ranks: int | None = None
    restarts: int = 0
    accept_changed_data: bool = False


class Session:
    """`with session:` holds the run folder's lock and leaves the report, however the block ends.

    `say` hears what the user is told; from the moment there is a run folder, its logs/session.log does too.
    `plan` is plan.json's content. `finished` means that there is nothing to do and nothing was changed.
    """

    def __init__(self, asked: Asked, say: Callable[[str], None], launcher: str | None = None, world: int | None = None):
        """Read and check everything that can be known now, and change nothing. Raises TercetError.

        `launcher` and `world` (ranks) describe a launcher that has started the ranks; None when we start them.
        """
        refuse_options(asked, launcher, world)
        self._say, self._early, self._made = say, [], False
        self._asked, self.changes = asked, {}
        self._before: dict[Path, bytes] = {}  # of a run that goes on: files as they were
        self._begun_before: set[float] = set()
        self.finished = False
        self._run: RunFolder | None = None
        self._lock: RunLock | None = None
        ranks = asked.ranks if world is None else world
        if asked.resume is not None:
            self._run = open_run(asked.resume)
            self.recipe = load_run_recipe(self._run.recipe, asked.overrides)
            self.changes = changed_keys(load_run_recipe(self._run.recipe), self.recipe)
            if has_trained(self._run):
                refuse_changes(self.changes)
            summary = self._run.read_summary() or {}
            if summary.get("finished") and not self.changes:
                self.finished = True
                say(
                    f"{self._run.path} is finished: {summary['steps']} steps; nothing to resume. "
                    f"More steps: {RunFolder(Path(asked.resume)).resume} train.steps={2 * summary['steps']}"
                )
                return
            ranks = ranks or (self._run.read_plan() or {}).get("strategy", {}).get("ranks")
        else:
            self.recipe = load_recipe(asked.recipe or "", asked.overrides)
            check_output(asked.output or self.recipe.output.folder or "runs")
        self._micro_batch_is_ours = self.recipe.strategy.micro_batch == "auto"
        check_files(self.recipe)
        self.plan = make_plan(self.recipe, ranks, self.say)
        if not (self._run is not None and (self._run.path / "tokenizer").is_dir()):  # then it uses its own
            check_tokenizer(self.recipe)

    @property
    def run(self) -> RunFolder:
        assert self._run is not None, "the session has not been entered"
        return self._run

    @property
    def ranks(self) -> int:
        return self.plan["strategy"]["ranks"]

    @property
    def restarts(self) -> int:
        return self._asked.restarts

    @property
    def accept_changed_data(self) -> bool:
        return self._asked.accept_changed_data

    def say(self, text: str) -> None:
        """Tell the user; a console that is gone changes nothing, and the run folder's log keeps the sentence."""
        self._early.append(text)
        if self._run is not None and self._run.logs.is_dir():
            try:
                with (self._run.logs / "session.log").open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in self._early))
            except OSError:  # a full disk
                pass
            self._early = []
        with contextlib.suppress(OSError):
            self._say(text)

    def __enter__(self) -> Session:
        if self._run is None:
            self._run, self._made = new_run(self.recipe, self._asked.output)
        try:
            self._lock = RunLock(self._run.lock)
            self._begin(self._run)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def _begin(self, run: RunFolder) -> None:
        if not has_trained(run):
            remove_start(run)
        run.logs.mkdir(parents=True, exist_ok=True)
        for old in run.logs.glob("error-rank-*.json"):
            old.unlink()
        shutil.rmtree(run.logs / WARNED, ignore_errors=True)
        for key, (old, new) in self.changes.items():
            self.say(f"changed: {key}: {old} -> {new}")
        if has_trained(run):
            self._before = {path: path.read_bytes() for path in (run.recipe, run.plan, run.summary) if path.exists()}
            self._begun_before = begun(run)
        write_run(run, self.recipe, self.plan)
        run.summary.unlink(missing_ok=True)
        self.say(f"run folder: {run.path}")
        if not self._before and (short := _short_of_disk(run, self.plan)):
            self.say(short)

    def take_smaller_micro_batch(self, error: CardFullError) -> bool:
        """Plan the run with a smaller micro-batch and the same effective batch, for its next start and all later ones.
        False when the recipe fixes the micro-batch or none is smaller.
        """
        before, smaller = self.plan["micro_batch"], with_smaller_micro_batch(self.recipe, self.plan)
        if smaller is None or not self._micro_batch_is_ours:
            return False
        self.plan, number = smaller, smaller["micro_batch"]
        strategy = self.recipe.strategy.model_copy(update={"micro_batch": number})
        self.recipe = self.recipe.model_copy(update={"strategy": strategy})
        write_run(self.run, self.recipe, self.plan)
        self.say(
            f"{error.message}\nmicro-batch {before} does not fit: begins again with strategy.micro_batch={number} x "
            f"accumulation {smaller['accumulation']}, the same effective batch"
        )
        return True

    def hold(self, pids: Sequence[int | None]) -> None:
        """Write the ranks' processes into the lock."""
        assert self._lock is not None
        self._lock.ranks(list(pids))

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        run = self.run
        if error is not None and self._before and begun(run) <= self._begun_before:
            from tercet.training.record import replace_file

            for path, content in self._before.items():  # refused before a step: the run stays what it was
                replace_file(path, content)
        never_began = isinstance(error, InputError | NotLegalError | InterruptedRun) and not has_trained(run)
        if self._made and never_began:
            # Nothing to look at and nothing to resume: a leftover would only get in the way of the next start.
            shutil.rmtree(run.path, ignore_errors=True)
        elif self._lock is not None:
            leave_report(run, self.say)
        if self._lock is not None:
            self._lock.release()
        if isinstance(error, InterruptedRun) and not (self._made and never_began):
            error.hint = resume_command(run)


def _short_of_disk(run: RunFolder, plan: dict[str, Any]) -> str | None:
    """Return what is to be said when the run folder's disk has no room for what the run will write."""
    need, free = plan.get("disk_bytes") or 0, shutil.disk_usage(run.path).free
    if need <= free:
        return None
    return (
        f"disk: checkpoints, model and files need {show_bytes(need)}, {show_bytes(free)} are free in {run.path}; at the "
        "first save without room the run does what output.disk_full says"
    )


def resume_command(run: RunFolder) -> str:
    return f"Continue with: {run.resume}"


def begun(run: RunFolder) -> set[float]:
    """Return when the ranks of this run have come to their first step. A resumed run forgets those that it undoes."""
    return {event.get("time", 0.0) for event in run.read_events() if event["event"] in ("start", "resume")}


def has_trained(run: RunFolder) -> bool:
    """Return whether a run has done a step or holds anything that a user might want."""
    return (
        run.checkpoints.exists()
        or run.model.exists()
        or run.adapter.exists()
        or any(e["event"] == "step" for e in run.read_events())
    )


def remove_start(run: RunFolder) -> None:
    """Remove what a start that never came to a step has left, and nothing else. Call with the lock held."""
    from tercet.data.kept import FILE, TOKENIZER

    if not (run.plan.exists() and run.recipe.exists()):  # somebody's folder, not a start of ours
        return
    for path in (run.recipe, run.plan, run.data, run.data_page, run.events, run.ds_config, run.report, run.path / FILE):
        path.unlink(missing_ok=True)
    for folder in (run.tensorboard, run.path / TOKENIZER):
        shutil.rmtree(folder, ignore_errors=True)


def leave_report(run: RunFolder, say: Callable[[str], None]) -> None:
    """Write report.html, of a finished run or of one that was stopped; failing at it does not fail the run."""
    from tercet.report.page import write_report

    if not run.events.exists():
        return
    try:
        write_report(run)
    except Exception as error:
        say(f"the report could not be written ({error}); later: tercet report {run.path}")


# ------------------------------------------------------------------------------------------------- what is refused


def refuse_options(asked: Asked, launcher: str | None, world: int | None) -> None:
    """Raise InputError for an option that could not act."""
    if asked.resume is not None and asked.output is not None:
        raise InputError(
            f"--output {asked.output} with --resume: a resumed run stays in its folder",
            "Leave --output away, or copy the folder and resume the copy.",
        )
    if moved := [o for o in asked.overrides if o.partition("=")[0].strip() == "output.folder"]:
        if asked.resume is not None:
            raise InputError(f"{moved[0]} with --resume: a resumed run stays in its folder", f"Leave {moved[0]} away.")
        if asked.output is not None:
            raise InputError(f"--output {asked.output} and {moved[0]} name the run folder twice", "Give one of them.")
    if asked.accept_changed_data and asked.resume is None:
        raise InputError("--accept-changed-data is for --resume: a new run takes its data as it is")
    if launcher is None:
        return
    if asked.ranks is not None and asked.ranks != world:
        raise InputError(
            f"--ranks {asked.ranks}, but {launcher} has started {world}",
            f"Leave --ranks away, or have {launcher} start {asked.ranks}.",
        )
    if asked.restarts:
        raise InputError(
            f"--restarts {asked.restarts}: {launcher} holds the processes, so only it can start them again",
            "With torchrun: --max-restarts N, and train --resume RUN; or start with tercet train alone.",
        )


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
            f"a resumed run cannot change this: {'; '.join(sentences)}",
            "Model, adapter, what is frozen, data, seed and effective batch decide what the run is. Start a new run for that.",
        )


# ------------------------------------------------------------------------------------------------- the run folder


def new_run(recipe: Recipe, output: str | None) -> tuple[RunFolder, bool]:
    """Return the folder of a new run and whether it was made now. Raises InputError when it holds a run already."""
    wanted = output or recipe.output.folder
    if wanted is not None:
        run = RunFolder(Path(wanted).expanduser().absolute())
        # One that never came to a step is nothing to lose: it is taken over, whatever its recipe was.
        if any(path.exists() for path in (run.recipe, run.events, run.checkpoints)) and (
            has_trained(run) or not run.plan.exists()
        ):
            raise InputError(f"{run.path} holds a run already", f"{resume_command(run)}; or give another folder.")
        if there := _foreign(run):
            raise InputError(
                f"{run.path} holds {', '.join(there)}, which no run of this folder has made and this one would replace",
                "Give another: --output DIR.",
            )
        made = not run.path.exists()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output.folder cannot be made: {file_error(error) or error}") from None
        return run, made
    base, number = Path("runs").absolute(), 1
    name = re.sub(r"[^\w.-]+", "-", recipe.name)
    while True:
        run = RunFolder(base / f"{name}-{number}")
        try:
            run.path.mkdir(parents=True)
            return run, True
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InputError(f"{file_error(error) or error}", "Give another: --output DIR.") from None


def _foreign(run: RunFolder) -> list[str]:
    """Return what lies in a folder under names that a run writes and that no start has made there."""
    from tercet.data.kept import FILE, TOKENIZER

    trained = [run.model, run.adapter]  # a start that came so far would have trained, and is not taken over
    begun = [run.plan, run.data, run.data_page, run.ds_config, run.summary, run.report, run.tensorboard]
    begun += [run.path / FILE, run.path / TOKENIZER]
    paths = trained if run.recipe.exists() and run.plan.exists() else [*trained, *begun]
    there = [path for path in paths if path.exists() or path.is_symlink()]
    return [f"{path.name}/" if path.is_dir() else path.name for path in there]


def write_run(run: RunFolder, recipe: Recipe, plan: dict[str, Any]) -> None:
    from tercet.training.record import replace_file, write_json

    replace_file(run.recipe, recipe.to_yaml().encode())
    write_json(run.plan, plan)
