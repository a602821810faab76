"""tercet init: write a commented recipe for this machine and these texts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.errors import InputError
from tercet.units import count_of

EXAMPLE = "Example: tercet init texts/*.jsonl --output mine.yaml"


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
    from tercet.data.sources import find
    from tercet.planner.answer import plan
    from tercet.spec.machine import this_machine
    from tercet.spec.recipe import SourceSection

    target = Path(output).expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output {output!r} must end in .yaml", "For example: --output mine.yaml")
    if target.exists():
        raise InputError(f"{target} exists already", "Give another name with --output, or delete it.")
    if not texts:
        raise InputError("init needs texts to train on", "For example: tercet init texts/*.jsonl")
    sources = [find(SourceSection(path=text), f"TEXT {n}") for n, text in enumerate(texts, 1)]
    if not sum(s.bytes for s in sources):
        raise InputError(
            f"there is nothing to train on: {', '.join(texts)} holds 0 bytes", "Give files that hold texts."
        )
    machine = this_machine()
    chosen = model or ("smollm2-135m" if machine.card else "first-light")
    content = recipe_text(chosen, texts, _shape(chosen, bool(machine.card)), machine.describe())
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
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
        "bytes": sum(s.bytes for s in sources),
        "files": sum(len(s.files) for s in sources),
        "machine": machine.describe(),
        "fits": fits,
    }
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    typer.echo(
        f"written: {target} ({count_of(found['files'], 'file')}, {found['bytes']:,} bytes of text; model {chosen})"
    )
    typer.echo("on this machine: " + (f"fits, {fits[0]}" if fits else "does not fit; tercet plan says what would"))
    name = shlex.quote(str(target))
    typer.echo(f"next: tercet prepare {name} --show 2\n      tercet plan {name}\n      tercet train {name}")


def _shape(model: str, card: bool) -> dict[str, int]:
    """Return the length of a row and the effective batch to begin with."""
    from tercet.spec.families import describe
    from tercet.spec.recipe import ModelSection

    context = describe(ModelSection.model_validate(model)).context_tokens
    return {"sequence": min(2048 if card else 256, context), "batch": 96 if card else 24}


def recipe_text(model: str, texts: list[str], shape: dict[str, int], machine: str) -> str:
    import json

    from tercet.spec.recipe import ModelSection

    start = ModelSection.model_validate(model).start
    own = "random" in start
    tokenizer = (
        "  tokenizer: train             # a byte-level BPE of this text; or a tokenizer.json, a folder, a hub name\n"
        if own
        else "  tokenizer: model             # the model's own\n"
    )
    # JSON strings are YAML strings, whatever a file is called.
    paths = "".join(f"    - path: {json.dumps(text, ensure_ascii=False)}\n" for text in texts)
    return f"""\
# Written by tercet init for {machine}. Every key: tercet train THIS_FILE --print-recipe
model: {json.dumps(model, ensure_ascii=False)}   # weights: {start}; tercet list shows presets
data:
  train:                       # files, folders or globs; weight: 2 trains a source twice as often
{paths}  validation: 0.02             # share of the documents held out
  sequence_tokens: {shape["sequence"]}
{tokenizer}  long_rows: split             # or drop (counted), or cut
strategy: auto                 # the planner chooses; tercet plan THIS_FILE shows what and why
optim:
  lr: {"1e-3" if own else "2e-5"}{" " * 21}# lower it when the loss jumps; larger models want less
  warmup_steps: 20
  min_lr_ratio: 0.1
train:
  batch_sequences: {shape["batch"]}          # sequences per step over all ranks: the effective batch
  epochs: 1                    # or steps: 1000
  evaluate_every: 100
output:
  checkpoint_every: 200        # 0: only at the end
  keep: 2
"""
