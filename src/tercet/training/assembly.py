"""What a rank builds before its first step: recipe -> data -> model -> engine, and where an interrupted run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from rich.console import Console

from tercet.data.kept import RunData, read_kept
from tercet.data.loader import Loader
from tercet.data.prepare import Prepared, prepare
from tercet.engine import Engine, EngineSetup, open_engine
from tercet.errors import InputError
from tercet.model.through_transformers import as_built
from tercet.parallel.mesh import lay_out
from tercet.parallel.world import World
from tercet.spec.families import describe
from tercet.spec.families.through_transformers import TransformersModel
from tercet.spec.families.where import tokenizer_place
from tercet.spec.model import Model
from tercet.spec.recipe import Recipe
from tercet.spec.run_folder import RunFolder
from tercet.spec.strategy import Strategy
from tercet.spec.trained import trained_model
from tercet.training.checkpoint import find_checkpoint
from tercet.training.loop import Progress
from tercet.training.record import preparation_bar
from tercet.training.schedule import schedule_remarks
from tercet.training.swap import swap_folder
from tercet.weights.fingerprint import fingerprint
from tercet.weights.reading import model_place, stored_weights


@dataclass(frozen=True)
class Assembled:
    """One rank's run, ready for its first step."""

    recipe: Recipe
    run: RunFolder
    world: World
    spec: Model
    strategy: Strategy
    prepared: Prepared
    kept: RunData | None  # what the run was begun with, when it is resumed
    loader: Loader
    total_steps: int
    engine: Engine
    progress: Progress
    base: str | None  # fingerprint of the weights that are not trained, which no checkpoint holds


def assemble(
    recipe: Recipe,
    run: RunFolder,
    world: World,
    say: Callable[[str], None],
    console: Console | None,
    accept_changed_data: bool,
) -> Assembled:
    """Prepare the data, build the engine and restore the newest checkpoint, if there is one."""
    kept = read_kept(run.path, accept_changed_data)
    prepared = prepare_data(recipe, say, console, kept)
    spec = trained_model(recipe)
    if isinstance(spec, TransformersModel):
        spec = as_built(spec)
    strategy = Strategy(**(run.read_plan() or {})["strategy"])
    world = lay_out(world, strategy.mesh)
    loader = Loader(prepared, recipe.train.batch_sequences, recipe.train.seed)
    total_steps = steps_of(recipe, loader.rows_per_epoch)
    for remark in schedule_remarks(recipe.optim, total_steps):
        say(remark)
    if more := rows_beyond(recipe, loader.rows_per_epoch, total_steps):
        say(more)
    world.meet()  # whoever prepared the data
    engine = _engine(recipe, run, spec, strategy, prepared, world)
    world.meet()  # one rank's weights may come from a slower disk
    base = _base(recipe, spec, world)
    progress = _resume(run, engine, world, say, base, recipe.model.path)
    if total_steps < progress.step:
        raise InputError(
            f"train.steps: {total_steps} steps are asked for, and {progress.step} are done and saved",
            f"Ask for more than that, or begin another run: checkpoints of earlier steps are in {run.checkpoints}.",
        )
    return Assembled(recipe, run, world, spec, strategy, prepared, kept, loader, total_steps, engine, progress, base)


def _base(recipe: Recipe, spec: Model, world: World) -> str | None:
    """Return the fingerprint of a model of which only a part is trained and saved; rank 0 looks, all get it."""
    if recipe.model.path is None or recipe.model.init == "random" or spec.trained_parameters == spec.parameters:
        return None
    return world.meet(fingerprint(model_place(recipe.model.path)) if world.rank == 0 else None)[0]


def prepare_data(
    recipe: Recipe, say: Callable[[str], None], console: Console | None, kept: RunData | None = None
) -> Prepared:
    """Prepare the recipe's data, or find it prepared; shows a bar when there is a terminal.

    `kept`: what the run was begun with, when it is resumed.
    """
    path = recipe.model.path
    with preparation_bar(console) as bar:
        return prepare(
            recipe.data,
            vocabulary=describe(recipe.model).vocabulary,
            model_tokenizer=tokenizer_place(path),
            seed=recipe.train.seed,
            say=say,
            progress=bar,
            kept=kept,
        )


def steps_of(recipe: Recipe, rows_per_epoch: int) -> int:
    """Return the run's optimizer steps; an epoch that ends within a step is rounded up to that step."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    epochs = recipe.train.epochs if recipe.train.epochs is not None else 1.0
    return max(1, math.ceil(epochs * rows_per_epoch / recipe.train.batch_sequences))


def rows_beyond(recipe: Recipe, rows_per_epoch: int, total_steps: int) -> str | None:
    """Return what is to be said when the last step goes beyond the epochs that were asked for, else None."""
    wanted = (1.0 if recipe.train.epochs is None else recipe.train.epochs) * rows_per_epoch
    batch = recipe.train.batch_sequences
    beyond = math.floor(total_steps * batch - wanted)
    if recipe.train.steps is not None or beyond < 1:
        return None
    return (
        f"epochs: {wanted:g} sequences are {wanted / batch:.4g} batches of {batch}, trained in {total_steps} whole "
        f"steps; the last one takes {beyond} sequences more, from the next epoch"
    )


def _engine(
    recipe: Recipe, run: RunFolder, spec: Model, strategy: Strategy, prepared: Prepared, world: World
) -> Engine:
    torch.backends.cuda.matmul.allow_fp16_accumulation = recipe.train.fp16_accumulation
    weights = None
    if recipe.model.path is not None and recipe.model.init != "random":
        weights = stored_weights(recipe.model.path, spec if spec.adapter is None else describe(recipe.model))
    elif recipe.model.init == "pretrained":
        raise InputError(
            "model.init is pretrained but the model is a preset, which has no weights",
            "Give the folder or hub name that holds them as model.path, or set model.init=random.",
        )
    return open_engine(
        EngineSetup(
            spec,
            strategy,
            recipe.optim,
            recipe.train.precision,
            world,
            seed=recipe.train.seed,
            weights=weights,
            vocabulary=prepared.vocabulary,
            stop_ids=prepared.stop_ids,
            batch_sequences=recipe.train.batch_sequences,
            sources=len(prepared.train.sources),
            swap=swap_folder(recipe, run) if strategy.on_nvme else None,
        )
    )


def _begins_again(run: RunFolder, say: Callable[[str], None]) -> None:
    """Say why a run that began before begins again. Raises InputError when that would replace what it has trained."""
    kinds = {event["event"] for event in run.read_events()}
    if there := next((path for path in (run.model, run.adapter) if path.exists()), None):
        raise InputError(
            f"the checkpoints of {run.path} are gone, and {there.name}/ holds what it has trained: beginning again would replace it",
            f"Put the checkpoints back; or move {there} away to begin again at step 1.",
        )
    if "checkpoint" in kinds:
        say("the checkpoints of this run are gone: begins again at step 1")
    elif kinds & {"start", "step"}:
        say("no checkpoint had been published yet: begins again at step 1")


def _resume(
    run: RunFolder, engine: Engine, world: World, say: Callable[[str], None], base: str | None, path: str | None
) -> Progress:
    """Restore the newest complete checkpoint, all of it or nothing; step 0 when none was ever published."""
    found = find_checkpoint(run.checkpoints, world)
    if found is None:
        _begins_again(run, say)
        return Progress()
    for reason in found.skipped:
        say(f"passed over a checkpoint that is not complete: {reason}")
    if found.state.get("base", base) != base:
        raise InputError(
            f"model.path: the weights of {path} have changed since this run began; what it has trained belongs to the others",
            "Put those back, or begin a new run on these.",
        )
    restored = engine.load(found.folder)
    world.meet()  # ranks read different files
    if world.rank == 0:
        for folder in found.damaged:  # aside: there it neither counts among the kept ones nor is it read again
            with suppress(OSError):
                folder.rename(folder.with_name(f"damaged-{folder.name}"))
    saved = found.state
    before = saved.get("ranks")
    others = "" if before == world.size else f" (saved on {before} ranks, now {world.size})"
    say(f"resumed from {found.folder}: {', '.join(restored)}; next step {saved['step'] + 1}{others}")
    known = {name: saved[name] for name in vars(Progress()) if name in saved}
    return Progress(**known)
