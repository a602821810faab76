"""One rank's run from data to finished folder: assemble, record, loop, finish. No logic of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from tercet.data.figures import lines
from tercet.data.kept import RunData, keep
from tercet.data.prepare import Prepared
from tercet.data.show import documents
from tercet.data.tokenizer import load as load_tokenizer
from tercet.engine import Engine
from tercet.errors import InputError, InterruptedRun, RunError
from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.planner.ledger import save_bytes
from tercet.report.data_page import data_page
from tercet.spec.recipe import Recipe
from tercet.spec.run_folder import FORMAT, RunFolder
from tercet.spec.strategy import Work
from tercet.training.assembly import Assembled, assemble
from tercet.training.checkpoint import Checkpoints
from tercet.training.disk import Disk, agreed
from tercet.training.finish import summarise, versions, write_model
from tercet.training.loop import Loop
from tercet.training.record import Recorder, write_json
from tercet.training.schedule import further_terms
from tercet.training.stop import Stop
from tercet.training.untrained import untrained_marks

SHOWN_CHATS = 10


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
        built = assemble(recipe, run, world, say, console, accept_changed_data)
    disk = Disk(run, built.world, recipe.output.disk_full, say if world.rank == 0 else lambda text: None, stopped)
    record = _open_record(built, disk, console)
    if record is not None and (untrained := untrained_marks(recipe, built.spec, built.prepared)):
        record.warn(untrained)
    loop = _loop(built, disk, record, stopped, at)
    try:
        loop.run()
        at(loop.progress.step, [])
        write_model(built, disk, stopped)
        if (loop.progress.step, "evaluation") in loop.failed:
            raise RunError(
                "the model is trained, saved and written, but its last evaluation failed (see above)",
                f"Evaluate it again with: {run.resume}",
            )
        summarise(built, disk, loop, record, time.time() - begin)
    except InterruptedRun:
        if record is not None:
            record.event("interrupted", step=loop.progress.step)
        raise
    finally:
        if record is not None:
            record.close()
    built.world.meet()  # rank 0 has written the summary


def _show_data(run: RunFolder, prepared: Prepared) -> None:
    """Write data.html: what of the first chats is trained, as the model sees them."""
    figures = prepared.report
    page = data_page(run.path.name, lines(figures), figures, list(documents(prepared, SHOWN_CHATS)))
    run.data_page.write_text(page, encoding="utf-8")


def _open_record(built: Assembled, disk: Disk, console: Console | None) -> Recorder | None:
    """Return rank 0's recorder, None on the others; what is known before the first step is written."""
    run, progress = built.run, built.progress
    opened: list[Recorder] = []
    sources = [s["path"] for s in built.prepared.report["sources"]]
    about = {
        "step": progress.step,
        "ranks": built.world.size,
        "strategy": built.strategy.name,
        "micro_batch": built.strategy.micro_batch,
        "parameters": built.spec.parameters,
        "total_steps": built.total_steps,
        "data": built.prepared.key,
        "sources": sources,
        "versions": versions(),
    }
    done = {"evaluate": progress.validated_step, "sample": progress.sampled_step}

    def begin() -> None:
        write_json(run.data, built.prepared.report)
        if "chats" in built.prepared.report:
            _show_data(run, built.prepared)
        keep_sources(run, built.prepared, built.kept)
        if built.engine.config is not None:  # what DeepSpeed was told
            write_json(run.ds_config, built.engine.config)
        done_there = [kind for kind, step in done.items() if step == progress.step]
        opened.append(Recorder(run, built.total_steps, console, progress.step, done_there, sources))
        opened[0].event("resume" if progress.step else "start", **about)

    disk.write("the run's record", 0, lambda _: agreed(built.world, begin, only=0)[1])
    return opened[0] if opened else None


def _loop(
    built: Assembled,
    disk: Disk,
    record: Recorder | None,
    stopped: Callable[[], bool],
    at: Callable[[int, list[int]], None],
) -> Loop:
    recipe, spec, world, prepared, progress = built.recipe, built.spec, built.world, built.prepared, built.progress
    job = of_strategy(built.strategy, Work.of(recipe), spec.module)
    needed_bytes = int(save_bytes(spec.trained_parameters, job))
    return Loop(
        built.engine,
        built.loader,
        world,
        Checkpoints(built.run, world, disk, recipe.output.keep, needed_bytes, record, progress.step),
        record,
        recipe.train,
        recipe.optim,
        total_steps=built.total_steps,
        micro_batch=built.strategy.micro_batch,
        checkpoint_every=recipe.output.checkpoint_every,
        progress=progress,
        stop_requested=stopped,
        state={
            "format": FORMAT,
            "ranks": world.size,
            "strategy": built.strategy.name,
            "data": prepared.key,
            **({"base": built.base} if built.base else {}),
        },
        sample=_sampler(recipe, prepared, built.engine, record),
        has_validation=prepared.validation is not None,
        at=at,
        terms=lambda update: further_terms(recipe.train, spec, update, built.total_steps),
    )


def keep_sources(run: RunFolder, prepared: Prepared, kept: RunData | None) -> None:
    """Keep what this start trains on in the run folder; a later start is compared with it."""
    if kept is None or kept.key != prepared.key:
        # The tokenizer that decided the tokens at first stays the one that later starts are measured by.
        decides = prepared.decides if kept is None else kept.tokenizer
        rows = prepared.report["rows"]["read"]
        keep(run.path, prepared.key, decides, prepared.files, rows, prepared.tokenizer_folder)


def _sayer(console: Console | None) -> Callable[[str], None]:
    def say(text: str) -> None:
        if console is not None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)  # a rank's own log file

    return say


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
