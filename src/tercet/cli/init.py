"""tercet init: write a commented recipe for this machine and these texts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercet.cli.plan import BYTES_PER_TOKEN
from tercet.errors import InputError
from tercet.units import count_of

if TYPE_CHECKING:
    from tercet.data.first_look import FirstLook
    from tercet.spec.recipe import ModelSection

EXAMPLE = "Example: tercet init texts/*.jsonl --output mine.yaml"

BATCHES = (96, 48, 24, 12, 6, 3)  # divisible by 1 and 3 ranks, most of them by 2, 4 and 6
WANTED_STEPS = 240  # of a first run on little text: enough to warm up, learn and be looked at on the way
FEWEST_STEPS = 100
MOST_EPOCHS = 40  # from random weights; after as many, text is learned by heart
MOST_EPOCHS_TRAINED = 6  # of weights that somebody trained, which forget what else they knew


@dataclass(frozen=True)
class FirstRun:
    """The numbers of a first run. `steps` is an estimate; `validation` None: nothing is held out."""

    sequence_tokens: int
    batch_sequences: int
    epochs: int
    steps: int
    warmup_steps: int
    evaluate_every: int
    checkpoint_every: int
    validation: float | None


def first_run(
    text_bytes: int, documents: int, sequence: int, largest_batch: int, ranks: int, pretrained: bool
) -> FirstRun:
    """Return a sensible first run on so much text, by bytes alone: what is counted later may be twice or half of it.

    So warm-up is a twentieth of the steps, and evaluations and checkpoints are planned for five and four times.
    """
    tokens = text_bytes / BYTES_PER_TOKEN
    held = 0.1 if documents < 50 else 0.05 if tokens < 2e6 else 0.02
    rows = max(1.0, tokens * (1 - held) / sequence)
    even = [b for b in BATCHES if b <= largest_batch and b % ranks == 0]
    batches = even or [b for b in BATCHES if ranks <= b <= largest_batch] or [ranks]
    # Less text is cut into smaller batches first, and only then read more often.
    batch = next((b for b in batches if rows >= WANTED_STEPS / 4 * b), batches[-1])
    per_epoch = rows / batch
    epochs = min(MOST_EPOCHS_TRAINED if pretrained else MOST_EPOCHS, max(1, ceil(WANTED_STEPS / per_epoch)))
    steps = max(1, round(epochs * per_epoch))
    return FirstRun(
        sequence_tokens=sequence,
        batch_sequences=batch,
        epochs=epochs,
        steps=steps,
        warmup_steps=min(steps // 20, 200),
        evaluate_every=_round(min(max(1, steps // 5), 500)),
        checkpoint_every=_round(min(max(1, steps // 4), 1000)),
        validation=held if documents > 1 else None,
    )


def _round(number: int) -> int:
    """Return a number down to one or two leading figures: 53 is 50, 147 is 140."""
    unit = 10 ** max(0, len(str(number)) - 2) * (10 if 20 < number < 100 else 1)
    return number // unit * unit


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def init(
        texts: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT...", help="Files, folders or globs to train on.")
        ] = None,
        model: Annotated[
            str | None, typer.Option(help="Preset, folder or hub name; default: a small one that suits this machine.")
        ] = None,
        output: Annotated[str, typer.Option(help="The recipe to write.")] = "recipe.yaml",
        as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
    ) -> None:
        """Write a recipe for this machine and these texts, with a comment on every key that people change."""
        run(texts or [], model, output, as_json)


def run(texts: list[str], model: str | None, output: str, as_json: bool) -> None:
    from tercet.data.first_look import look
    from tercet.planner.answer import plan
    from tercet.spec.machine import this_machine

    target = Path(output).expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output {output!r} must end in .yaml", "For example: --output mine.yaml")
    if target.exists():
        raise InputError(f"{target} exists already", "Give another name with --output, or delete it.")
    if not texts:
        raise InputError("init needs texts to train on", "For example: tercet init texts/*.jsonl")
    seen = look(texts, "TEXT")
    size = sum(s.bytes for s in seen.sources)
    if not size:
        raise InputError(
            f"there is nothing to train on: {', '.join(texts)} holds 0 bytes", "Give files that hold texts."
        )
    machine = this_machine()
    chosen = model or ("smollm2-135m" if machine.card else "first-light")
    first = _first_run(chosen, seen, bool(machine.card), machine.ranks)
    content = recipe_text(chosen, seen, first, machine.describe())
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        target.unlink(missing_ok=True)  # half of it, or none: the next init would find it there
        raise InputError(f"{target} cannot be written: {error.strerror}") from None
    try:
        answer = plan(str(target))
    except InputError:
        target.unlink()
        raise
    fits = [s["name"] for s in answer["strategies"]]
    found: dict[str, Any] = {
        "recipe": str(target),
        "model": chosen,
        "bytes": size,
        "files": sum(len(s.files) for s in seen.sources),
        "chats": seen.chats,
        "maps": {s.name: s.section.map for s in seen.sources if s.section.map},
        "about_steps": first.steps,
        "machine": machine.describe(),
        "fits": fits,
        "notes": _notes(seen, first, model is None),
    }
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    what = "chats" if seen.chats else "text"
    typer.echo(f"written: {target} ({count_of(found['files'], 'file')}, {size:,} bytes of {what}; model {chosen})")
    for note in found["notes"]:
        typer.echo(note)
    typer.echo("on this machine: " + (f"fits, {fits[0]}" if fits else "does not fit; tercet plan says what would"))
    name = shlex.quote(str(target))
    typer.echo(f"next: tercet prepare {name} --show 2\n      tercet plan {name}\n      tercet train {name}")


def _first_run(model: str, seen: FirstLook, card: bool, ranks: int) -> FirstRun:
    """Return the numbers of a first run of a model on what was seen."""
    from tercet.spec.families import describe
    from tercet.spec.recipe import ModelSection

    section = ModelSection.model_validate(model)
    longest = 2048 if card else 512 if seen.chats else 256
    sequence = min(longest, describe(section).context_tokens)
    return first_run(seen.text_bytes, seen.documents, sequence, 96 if card else 24, ranks, section.pretrained)


def _notes(seen: FirstLook, first: FirstRun, unasked: bool) -> list[str]:
    """Return what is worth knowing of the texts before the first run."""
    from tercet.data.formats.chats import flow

    notes = [f"{s.name}: columns are read by map: {flow(s.section.map)}" for s in seen.sources if s.section.map]
    if seen.unusable:
        notes.append(
            f"{count_of(seen.unusable, 'row')} cannot be used; tercet prepare names them (data.bad_rows=skip: without)"
        )
    if not first.validation:
        notes.append("there is but one document, so none is held out and no loss on unseen text can be told")
    if first.steps < FEWEST_STEPS:
        notes.append(
            f"the texts are little: about {count_of(first.steps, 'step')} of training, after which a model knows them "
            "by heart rather than anything else"
        )
    if seen.chats and unasked:
        notes.append(
            "the chats train a model from random weights; one that can speak already learns them from far fewer: "
            "--model FOLDER or a hub name"
        )
    return notes


def _template(model: ModelSection) -> str | None:
    """Return the template that chats need named: none where the model's tokenizer has one or is not here to be seen."""
    from tercet.data.template import find_template
    from tercet.spec.families.where import locate

    if model.path is None:
        return "chatml"  # a tokenizer that is trained gets its marks
    place = locate(model.path)
    return "chatml" if place is not None and find_template(place) is None else None


def recipe_text(model: str, seen: FirstLook, first: FirstRun, machine: str) -> str:
    import json

    from tercet.data.formats.chats import flow
    from tercet.spec.recipe import ModelSection

    section = ModelSection.model_validate(model)
    own = not section.pretrained
    tokenizer = (
        "  tokenizer: train             # a byte-level BPE of this text; or a tokenizer.json, a folder, a hub name\n"
        if own
        else "  tokenizer: model             # the model's own\n"
    )
    template = _template(section) if seen.chats else None
    chats = (
        f"  template: {template:<19}# how a chat becomes text; answers alone are trained (train_on)\n"
        if template
        else ""
    )
    # JSON strings are YAML strings, whatever a file is called.
    paths = "".join(
        f"    - path: {json.dumps(s.section.path, ensure_ascii=False)}\n"
        + (f"      map: {flow(s.section.map)}   # our column: the file's\n" if s.section.map else "")
        for s in seen.sources
    )
    held = (
        f"  validation: {first.validation:<17}# share of the documents held out\n"
        if first.validation
        else "  validation: none             # one document cannot be divided\n"
    )
    evaluate = f"  evaluate_every: {first.evaluate_every}\n" if first.validation else ""
    return f"""\
# Written by tercet init for {machine}. Every key: tercet train THIS_FILE --print-recipe
model: {json.dumps(model, ensure_ascii=False)}   # weights: {section.start}; tercet list shows presets
data:
  train:                       # files, folders or globs; weight: 2 trains a source twice as often
{paths}{held}  sequence_tokens: {first.sequence_tokens}
{tokenizer}{chats}  long_rows: split             # or drop (counted), or cut
strategy: auto                 # the planner chooses; tercet plan THIS_FILE shows what and why
optim:
  lr: {"1e-3" if own else "2e-5"}{" " * 21}# lower it when the loss jumps; larger models want less
  warmup_steps: {first.warmup_steps}
  min_lr_ratio: 0.1
train:
  batch_sequences: {first.batch_sequences:<12}# sequences per step over all ranks: the effective batch
  epochs: {first.epochs:<21}# about {count_of(first.steps, "step")}; or steps: 1000
{evaluate}output:
  checkpoint_every: {first.checkpoint_every:<11}# 0: only at the end
  keep: 2
"""
