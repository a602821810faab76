"""The assembly of one rank's run: recipe -> world -> data -> model -> engine -> loop -> the finished folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tercet import __version__
from tercet.data.kept import Kept, keep, read_kept
from tercet.data.loader import Loader
from tercet.data.prepare import Prepared, prepare
from tercet.data.tokenizer import load as load_tokenizer
from tercet.engine import Engine, EngineSetup, open_engine
from tercet.errors import InputError, InterruptedRun, RunError
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
from tercet.training.disk import Disk, agreed
from tercet.training.loop import Loop, Progress, peak_bytes
from tercet.training.record import Recorder, preparation_bar, write_json
from tercet.training.schedule import further_terms, schedule_remarks
from tercet.training.stop import Stop
from tercet.training.swap import swap_folder
from tercet.training.trained import TrainedModel
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

    def stopped() -> bool:
        return stop.requested

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
        if more := rows_beyond(recipe, loader.rows_per_epoch, total_steps):
            say(more)
        world.meet()  # whoever prepared the data
        engine = _engine(recipe, run, spec, strategy, prepared, world)
        world.meet()  # one rank's weights may come from a slower disk
        progress = _resume(run, engine, world, say)
    disk = Disk(run, world, recipe.output.disk_full, say if world.rank == 0 else lambda text: None, stopped)
    about = {
        "step": progress.step,
        "ranks": world.size,
        "strategy": strategy.name,
        "parameters": spec.parameters,
        "total_steps": total_steps,
        "data": prepared.key,
        "versions": _versions(),
    }
    record = _open_record(run, world, disk, console, progress, about, prepared, kept, engine)
    checkpoints = Checkpoints(
        run, world, disk, recipe.output.keep, spec.parameters * BYTES_PER_SAVED_PARAMETER, record, progress.step
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
        stop_requested=stopped,
        state={"format": FORMAT, "ranks": world.size, "strategy": strategy.name, "data": prepared.key},
        sample=_sampler(recipe, prepared, engine, record),
        has_validation=prepared.validation is not None,
        at=at,
        terms=lambda update: further_terms(recipe.train, spec, update, total_steps),
    )
    try:
        loop.run()
        at(progress.step, [])
        _write_model(recipe, run, spec, prepared, engine, world, disk, stopped)
        if (progress.step, "evaluation") in loop.failed:
            raise RunError(
                "the model is trained, saved and written, but its last evaluation failed (see above)",
                f"Evaluate it again with: tercet train --resume {run.path}",
            )
        _summarise(run, world, disk, engine, loop, record, time.time() - begin)
    except InterruptedRun:
        if record is not None:
            record.event("interrupted", step=progress.step)
        raise
    finally:
        if record is not None:
            record.close()
    world.meet()  # rank 0 has written the summary


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
        EngineSetup(
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
    )


def _resume(run: RunFolder, engine: Engine, world: World, say: Callable[[str], None]) -> Progress:
    """Restore the newest complete checkpoint, all of it or nothing; step 0 when none was ever published."""
    found = find_checkpoint(run.checkpoints, world)
    if found is None:
        if any(event["event"] in ("start", "step") for event in run.read_events()):
            say("no checkpoint had been published yet: begins again at step 1")
        return Progress()
    for reason in found.skipped:
        say(f"passed over a checkpoint that is not complete: {reason}")
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


def _open_record(
    run: RunFolder,
    world: World,
    disk: Disk,
    console: Console | None,
    progress: Progress,
    about: dict[str, Any],
    prepared: Prepared,
    kept: Kept | None,
    engine: Engine,
) -> Recorder | None:
    """Return rank 0's recorder, None on the others; what is known before the first step is written."""
    opened: list[Recorder] = []
    done = {"evaluate": progress.validated_step, "sample": progress.sampled_step}

    def begin() -> None:
        write_json(run.data, prepared.report)
        keep_sources(run, prepared, kept)
        if engine.config is not None:  # what DeepSpeed was told
            write_json(run.ds_config, engine.config)
        done_there = [kind for kind, step in done.items() if step == progress.step]
        opened.append(Recorder(run, about["total_steps"], console, progress.step, done_there))
        opened[0].event("resume" if progress.step else "start", **about)

    disk.write("the run's record", 0, lambda _: agreed(world, begin, only=0)[1])
    return opened[0] if opened else None


def _sampler(
    recipe: Recipe, prepared: Prepared, engine: Engine, record: Recorder | None
) -> Callable[[int], None] | None:
    """Return what writes samples of the recipe's prompts: every rank generates, rank 0 records."""
    if not recipe.train.sample_prompts:
        return None
    prompts = recipe.train.sample_prompts

    def sample(step: int) -> None:
        tokenizer = load_tokenizer(prepared.tokenizer_folder / "tokenizer.json")
        ids = {text: tokenizer.prompt(text) for text in prompts}
        usable = [text for text in prompts if ids[text]]
        texts = engine.generate(
            [ids[text] for text in usable],
            recipe.train.sample_tokens,
            temperature=recipe.train.sample_temperature,
            seed=recipe.train.seed + step,
        )
        if record is not None:
            for prompt, more in zip(usable, texts, strict=True):
                record.sample(step, prompt, tokenizer.backend.decode(more))
        if len(usable) < len(prompts):
            empty = next(text for text in prompts if not ids[text])
            raise InputError(
                f"train.sample_prompts: {empty!r} has no tokens, and this tokenizer has none to begin a text with"
            )

    return sample


def _model_dtype(recipe: Recipe) -> str:
    return recipe.output.model_dtype or ("fp32" if recipe.train.precision == "fp32" else "bf16")


def _write_model(
    recipe: Recipe,
    run: RunFolder,
    spec: Model,
    prepared: Prepared,
    engine: Engine,
    world: World,
    disk: Disk,
    stopped: Callable[[], bool],
) -> None:
    """Write RUN/model, tensor by tensor through rank 0."""
    dtype = DTYPES[_model_dtype(recipe)]
    ids = {"eos": prepared.eos_id, "bos": prepared.bos_id, "pad": prepared.pad_id}

    def save(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        save_folder(
            folder,
            spec,
            tensors,
            dtype,
            prepared.tokenizer_folder,
            ids,
            source=locate(recipe.model.path) if recipe.model.path else None,
            new_tokenizer=recipe.data.tokenizer != "model",
        )

    model = TrainedModel(run, world, engine, save, stopped)
    disk.write("the trained model", spec.parameters * dtype.itemsize, model.attempt)


def _summarise(
    run: RunFolder, world: World, disk: Disk, engine: Engine, loop: Loop, record: Recorder | None, seconds: float
) -> None:
    """Say that the run is finished: nothing of it is left to do."""
    memory = world.meet((peak_bytes(world.device), engine.memory()))

    def write() -> None:
        assert record is not None
        record.flush()
        content = _summary(run, world, memory, loop, seconds)
        write_json(run.summary, content)
        record.event("end", **{k: content[k] for k in ("train_loss", "validation_loss")}, step=loop.progress.step)

    disk.write("summary.json", 0, lambda _: agreed(world, write, only=0)[1])


def _summary(run: RunFolder, world: World, memory: list[Any], loop: Loop, seconds: float) -> dict[str, Any]:
    p = loop.progress
    steps = [row for row in run.read_events() if row["event"] == "step"]
    steps = [row for row in steps if isinstance(row.get("seconds"), float) and isinstance(row.get("tokens"), int)]
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
        "failed": [f"step {step}: {what}" for step, what in loop.failed],
        "versions": _versions(),
    }
    return summary


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
