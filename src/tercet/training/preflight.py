"""What is found out before anything is made or started: paths, tokenizer, output, plan. Loads no torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tercet.engine.deepspeed.installed import require_deepspeed
from tercet.errors import InputError, NotLegalError, who_may
from tercet.planner.answer import plan_for_run, predict
from tercet.planner.search import micro_batches
from tercet.spec.adapter import describe_adapter
from tercet.spec.axes.split import either
from tercet.spec.cards import INSTALL_FOR_CARDS
from tercet.spec.families import describe
from tercet.spec.families.where import tokenizer_place
from tercet.spec.machine import this_machine
from tercet.spec.recipe import ModelSection, Recipe
from tercet.spec.strategy import Strategy, Work, nearest_batches, not_built, ranks_of, why_not
from tercet.spec.trained import trained_model
from tercet.weights.hub import ensure_here

Say = Callable[[str], None]


def check_files(recipe: Recipe) -> None:
    """Raise InputError for data that is not there or of no known format, before anything is read to its end."""
    from tercet.data import sources

    sources.find_all(recipe.data)


def check_tokenizer(recipe: Recipe) -> None:
    """Raise InputError for a tokenizer that is not there, cannot be read or is too large for the model.

    Call when the model is here. A hub's tokenizer, and one that only transformers can read, is left to the ranks.
    """
    from tercet.data.control import require_room, tokens_of

    if recipe.data.tokenizer == "train":
        require_room(describe(recipe.model).vocabulary, tokens_of(recipe.data.template))
        return
    from tercet.data import tokenizer

    place = tokenizer.locate(recipe.data.tokenizer, tokenizer_place(recipe.model.path))
    if isinstance(place, str):
        return
    if place.is_dir():
        if not any((place / name).is_file() for name in tokenizer.FILES):
            tokenizer.load(place)  # raises, naming what it looked for
        place = place / "tokenizer.json"
    if place.is_file() and place.suffix == ".json":
        size = tokenizer.size_of(place)
        vocabulary = describe(recipe.model).vocabulary
        if size > vocabulary:
            raise InputError(
                f"the tokenizer ({recipe.data.tokenizer}) has {size} ids, but model.vocabulary is {vocabulary}",
                f"Set model.vocabulary to at least {size}, or take another tokenizer.",
            )


def check_output(wanted: str) -> None:
    """Raise InputError when a run folder could not be made or written there; makes nothing."""
    path = Path(wanted).expanduser().absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"output.folder {path} cannot be made: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"output.folder {path} cannot be made: {who_may(existing)}", "Give another: --output DIR, or output.folder."
        )


def make_plan(recipe: Recipe, ranks: int | None, say: Say) -> dict[str, Any]:
    """Return plan.json's content for this machine. Raises NotLegalError with every reason why it cannot run."""
    if why := not_built(recipe):
        raise NotLegalError(why)
    require_base(recipe)
    ensure_here(recipe.model, say)
    model, work = trained_model(recipe), Work.of(recipe)
    wanted = recipe.strategy.data
    if ranks is not None and (meant := ranks_of(recipe.strategy, ranks)) != ranks:
        raise NotLegalError(
            [f"strategy.data is {wanted} but {ranks} rank{'s were' if ranks > 1 else ' was'} started"],
            f"Start {meant}, or leave strategy.data out.",
        )
    plan, strategy = plan_for_run(recipe, ranks)
    if why := why_not(model, strategy, work):
        raise NotLegalError(why)
    if strategy.engine == "deepspeed":
        require_deepspeed()
    say(f"weights: {recipe.model.start}")
    if left_out := without_further_predictions(recipe.model):
        say(left_out)
    for line in describe_adapter(model) if model.adapter else ():
        say(line)
    if model.freeze:
        say(f"frozen: {', '.join(model.freeze)}; {model.trained_parameters:,} of {model.parameters:,} are trained")
    if plan["machine"]["kind"] == "gpu":
        require_torch_with_cards(plan["machine"]["card"])
    for note in plan["machine"].get("notes", ()):
        say(note)
    _say_batch(strategy, work, say)
    return plan


def with_smaller_micro_batch(recipe: Recipe, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the plan with the same strategy and at most half the rows in a micro-batch, the effective batch as it was;
    None when there is one row."""
    strategy, work = Strategy(**plan["strategy"]), Work.of(recipe)
    usable = micro_batches(strategy.mesh.data_ranks, work)
    smaller = max((m for m in usable if 2 * m <= strategy.micro_batch + 1 and m < strategy.micro_batch), default=None)
    if smaller is None:
        return None
    return {**plan, **predict(recipe, replace(strategy, micro_batch=smaller), this_machine(strategy.ranks))}


def without_further_predictions(model: ModelSection) -> str | None:
    """Return what model.mtp_depth takes away from the model that it was set for; None when that is nothing."""
    if model.mtp_depth is None or model.path is None:
        return None
    own = len(describe(model.model_copy(update={"mtp_depth": None})).mtp)
    if model.mtp_depth >= own:
        return None
    return (
        f"model.mtp_depth is {model.mtp_depth}, {model.path} has {own}: its further predictions are left out, "
        "neither trained nor written into the new model"
    )


def require_base(recipe: Recipe) -> None:
    """Raise InputError for an adapter of random weights, and for a library that it needs and that is missing."""
    if recipe.adapter.kind == "none":
        return
    if not recipe.model.pretrained:
        raise InputError(
            f"adapter.kind is {recipe.adapter.kind}, which stands on trained weights, but the weights are "
            f"{recipe.model.start}",
            "Give the folder or hub name that holds them as model.path, or leave the adapter out.",
        )
    for needed in ("peft", *(["bitsandbytes"] if recipe.adapter.quantize == "nf4" else [])):
        if importlib.util.find_spec(needed) is None:
            raise InputError(f"the adapter needs {needed}, which is not installed", "pip install 'tercet[adapters]'")


def require_torch_with_cards(card: str) -> None:
    """Raise InputError when this PyTorch was built without CUDA; looks at its version file and does not load it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return  # the ranks say that it is missing
    version = Path(found.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    if re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", text, re.M) or not re.search(r"^cuda\b", text, re.M):
        return
    raise InputError(
        f"this machine has cards ({card}), but the installed PyTorch computes on the CPU alone",
        f"{INSTALL_FOR_CARDS}; or train on the CPU on purpose: --cpu.",
    )


def require_planned_device(plan: dict[str, Any], device: str) -> None:
    """Raise InputError when a run that was planned for cards has got no card."""
    if plan.get("machine", {}).get("kind") == "gpu" and device == "cpu":
        raise InputError(
            f"the plan is for cards ({plan['machine'].get('card')}), but PyTorch finds none that it can use",
            "The driver may be older than this PyTorch's CUDA: python -c 'import torch; torch.cuda.init()' says why. "
            "To train on the CPU on purpose: --cpu.",
        )


def _say_batch(strategy: Strategy, work: Work, say: Say) -> None:
    accumulation = strategy.accumulation(work.batch_sequences)
    say(
        f"{strategy.name} on {strategy.ranks} rank{'s' if strategy.ranks > 1 else ''}: micro-batch "
        f"{strategy.micro_batch} x accumulation {accumulation} x ranks {strategy.mesh.data_ranks}; effective batch "
        f"{work.batch_sequences} sequences ({work.batch_sequences * work.sequence_tokens} tokens)"
    )
    if idle := strategy.idle_rows(work.batch_sequences):
        below, above = nearest_batches(strategy, work.batch_sequences)
        say(
            f"{idle} of {idle + work.batch_sequences} sequences in each step are empty (the loss is weighted "
            f"exactly); train.batch_sequences {either(sorted({below, above}))} would leave none empty"
        )
