"""The assembly of one rank's run: recipe -> world -> data -> model -> engine -> loop -> the finished folder."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from tercet import __version__
from tercet.data.kept import Kept, keep, read_kept
from tercet.data.loader import Loader
from tercet.data.prepare import Prepared, prepare
from tercet.engine import Engine, open_engine
from tercet.errors import InputError
from tercet.parallel.mesh import lay_out
from tercet.parallel.world import World
from tercet.spec.families import describe
from tercet.spec.families.through_transformers import TransformersModel
from tercet.spec.families.where import locate, tokenizer_place
from tercet.spec.model import Model
from tercet.spec.recipe import Recipe
from tercet.spec.run_folder import FORMAT, RunFolder
from tercet.spec.strategy import Strategy
from tercet.training.checkpoint import Checkpoints, find_checkpoint
from tercet.training.loop import Loop, Progress, peak_bytes
from tercet.training.record import Recorder, preparation_bar, write_json
from tercet.training.schedule import further_terms, schedule_remarks
from tercet.training.stop import Stop
from tercet.training.swap import swap_folder
from tercet.weights.reading import DTYPES, stored_weights
from tercet.weights.writing import save_folder

BYTES_PER_SAVED_PARAMETER = 12  # fp32 weights and two moments


def run_rank(
    recipe: Recipe,
    run: RunFolder,
    world: World,
    stop: Stop,
    console: Console | None,
    at: Callable[[int, list[int]], None],
    accept_changed_data: bool = False,
) -> None:
    """Run this rank's part from data to finished folder. `console` is rank 0's; None on the others."""
    begin = time.time()
    say = _sayer(console)
    with stop.at_once():
        kept = read_kept(run.path, accept_changed_data)
        prepared = prepare_data(recipe, say, console, kept)
        spec = describe(recipe.model)
        if isinstance(spec, TransformersModel):
            from tercet.model.through_transformers import as_built

            spec = as_built(spec)
        strategy = Strategy(**(run.read_plan() or {})["strategy"])
        world = lay_out(world, strategy.mesh)
        loader = Loader(prepared, recipe.train.batch_sequences, recipe.train.seed)
        total_steps = steps_of(recipe, loader.rows_per_epoch)
        for remark in schedule_remarks(recipe.optim, total_steps):
            say(remark)
        engine = _engine(recipe, run, spec, strategy, prepared, world)
        progress = _resume(run, engine, world, say)
    record = None
    if world.rank == 0:
        record = Recorder(run, total_steps, console, first_step=progress.step)
        record.event(
            "resume" if progress.step else "start",
            step=progress.step,
            ranks=world.size,
            strategy=strategy.name,
            parameters=spec.parameters,
            total_steps=total_steps,
            data=prepared.key,
            versions=_versions(),
        )
        write_json(run.path / "data.json", prepared.report)
        keep_sources(run, prepared, kept)
        if isinstance(config := getattr(engine, "config", None), dict):  # what DeepSpeed was told
            write_json(run.ds_config, config)
    checkpoints = Checkpoints(
        run,
        world,
        recipe.output.keep,
        recipe.output.disk_full,
        spec.parameters * BYTES_PER_SAVED_PARAMETER,
        record.say if record else lambda text: None,
        lambda: stop.requested,
    )
    loop = Loop(
        engine,
        loader,
        world,
        checkpoints,
        record,
        recipe.train,
        recipe.optim,
        total_steps=total_steps,
        micro_batch=strategy.micro_batch,
        checkpoint_every=recipe.output.checkpoint_every,
        progress=progress,
        stop_requested=lambda: stop.requested,
        state={"format": FORMAT, "ranks": world.size, "strategy": strategy.name, "data": prepared.key},
        sample=_sampler(recipe, prepared, engine, record),
        has_validation=prepared.validation is not None,
        at=at,
        terms=lambda update: further_terms(recipe.train, spec, update, total_steps),
    )
    try:
        loop.run()
        at(progress.step, [])
        checkpoints.wait_for_space("the trained model", spec.parameters * DTYPES[_model_dtype(recipe)].itemsize)
        _write_model(recipe, run, spec, prepared, engine, world)
        _summarise(run, world, engine, progress, record, time.time() - begin)
    finally:
        if record is not None:
            record.close()
    world.barrier()


def prepare_data(
    recipe: Recipe, say: Callable[[str], None], console: Console | None, kept: Kept | None = None
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


def keep_sources(run: RunFolder, prepared: Prepared, kept: Kept | None) -> None:
    """Keep what this start trains on in the run folder; a later start is compared with it."""
    if kept is None or kept.key != prepared.key:
        # The tokenizer that decided the tokens at first stays the one that later starts are measured by.
        decides = prepared.decides if kept is None else kept.tokenizer
        rows = prepared.report["rows"]["read"]
        keep(run.path, prepared.key, decides, prepared.files, rows, prepared.tokenizer_folder)


def steps_of(recipe: Recipe, rows_per_epoch: int) -> int:
    """Return the run's optimizer steps; an epoch that ends within a step is rounded up to that step."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    epochs = recipe.train.epochs if recipe.train.epochs is not None else 1.0
    return max(1, math.ceil(epochs * rows_per_epoch / recipe.train.batch_sequences))


def _sayer(console: Console | None) -> Callable[[str], None]:
    def say(text: str) -> None:
        if console is not None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)  # a rank's own log file

    return say


def _engine(
    recipe: Recipe, run: RunFolder, spec: Model, strategy: Strategy, prepared: Prepared, world: World
) -> Engine:
    weights = None
    if recipe.model.path is not None and recipe.model.init != "random":
        weights = stored_weights(recipe.model.path, spec)
    elif recipe.model.init == "pretrained":
        raise InputError(
            "model.init is pretrained but the model is a preset, which has no weights",
            "Give the folder or hub name that holds them as model.path, or set model.init=random.",
        )
    return open_engine(
        spec,
        strategy,
        recipe.optim,
        recipe.train.precision,
        world,
        seed=recipe.train.seed,
        weights=weights,
        vocabulary=prepared.vocabulary,
        stop_ids=(prepared.eos_id,),
        batch_sequences=recipe.train.batch_sequences,
        swap=swap_folder(recipe, run) if strategy.on_nvme else None,
    )


def _resume(run: RunFolder, engine: Engine, world: World, say: Callable[[str], None]) -> Progress:
    """Restore the newest complete checkpoint, all of it or nothing; step 0 when none was ever published."""
    outcome: Any = None
    if world.rank == 0:  # one rank reads and checks the hashes; the others are told
        try:
            outcome = find_checkpoint(run.checkpoints)
        except InputError as error:
            outcome = error
    outcome = world.gather(outcome)[0]
    if isinstance(outcome, InputError):
        raise outcome
    if outcome is None:
        if run.events.exists():
            say("no checkpoint had been published yet: begins again at step 1")
        return Progress()
    for reason in outcome.skipped:
        say(f"passed over a checkpoint that is not complete: {reason}")
    restored = engine.load(outcome.folder)
    saved = outcome.state
    others = "" if saved["ranks"] == world.size else f" (saved on {saved['ranks']} ranks, now {world.size})"
    say(f"resumed from {outcome.folder}: {', '.join(restored)}; next step {saved['step'] + 1}{others}")
    known = {name: saved[name] for name in vars(Progress()) if name in saved}
    return Progress(**known)


def _sampler(
    recipe: Recipe, prepared: Prepared, engine: Engine, record: Recorder | None
) -> Callable[[int], None] | None:
    """Return what writes samples of the recipe's prompts: every rank generates, rank 0 records."""
    if not recipe.train.sample_prompts:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in recipe.train.sample_prompts]
    beginning = [prepared.bos_id] if prepared.bos_id is not None else []

    def sample(step: int) -> None:
        texts = engine.generate([beginning + ids for ids in prompts], recipe.train.sample_tokens)
        if record is not None:
            for prompt, ids in zip(recipe.train.sample_prompts, texts, strict=True):
                record.sample(step, prompt, tokenizer.decode(ids))

    return sample


def _model_dtype(recipe: Recipe) -> str:
    return recipe.output.model_dtype or ("fp32" if recipe.train.precision == "fp32" else "bf16")


def _write_model(recipe: Recipe, run: RunFolder, spec: Model, prepared: Prepared, engine: Engine, world: World) -> None:
    """Write RUN/model, tensor by tensor through rank 0, under a temporary name until it is whole."""
    if world.rank > 0:
        for _ in engine.weights():  # takes part in the gathering
            pass
        return
    temporary = run.path / ".model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    ids = {"eos": prepared.eos_id, "bos": prepared.bos_id, "pad": prepared.pad_id}
    save_folder(
        temporary,
        spec,
        engine.weights(),
        DTYPES[_model_dtype(recipe)],
        prepared.tokenizer_folder,
        ids,
        source=locate(recipe.model.path) if recipe.model.path else None,
        new_tokenizer=recipe.data.tokenizer != "model",
    )
    shutil.rmtree(run.model, ignore_errors=True)
    temporary.rename(run.model)


def _summarise(
    run: RunFolder, world: World, engine: Engine, p: Progress, record: Recorder | None, seconds: float
) -> None:
    memory = world.gather((peak_bytes(world.device), engine.memory()))
    if record is None:
        return
    steps = [row for row in run.read_events() if row["event"] == "step"]
    timed = steps[len(steps) // 10 :] or steps  # the first tenth warms up
    spent = sum(row["seconds"] for row in timed)
    summary = {
        "format": FORMAT,
        "finished": True,
        "steps": p.step,
        "tokens": p.tokens,
        "train_loss": p.train_loss,
        "validation_loss": p.validation_loss,
        "tokens_per_second": sum(row["tokens"] for row in timed) / spent if spent else None,
        "step_seconds": spent / len(timed) if timed else None,
        "seconds": seconds,
        "ranks": world.size,
        "device": world.device.type,
        "peak_bytes_per_rank": [peak for peak, _ in memory],
        "memory": {moment: [m[moment] for _, m in memory] for moment in ("between_steps", "peak")},
        "versions": _versions(),
    }
    record.event("end", step=p.step, train_loss=p.train_loss, validation_loss=p.validation_loss)
    write_json(run.summary, summary)


def _versions() -> dict[str, str]:
    import platform

    import numpy
    import tokenizers

    return {
        "tercet": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
    }
