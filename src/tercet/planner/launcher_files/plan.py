"""The plan of what a DeepSpeed or Accelerate file asks for, beside what the planner would choose itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tercet.errors import InputError
from tercet.planner.answer import plan, predict, read_recipe
from tercet.planner.constants import load
from tercet.planner.launcher_files.conflicts import conflicts
from tercet.planner.launcher_files.content import read_file
from tercet.planner.launcher_files.read import LauncherFile, read_accelerate, read_deepspeed
from tercet.planner.launcher_files.write import write_accelerate
from tercet.planner.legal import refusals
from tercet.planner.search import Search
from tercet.planner.table import need_line
from tercet.planner.ways import shortage, way_for
from tercet.spec.counts import Counts
from tercet.spec.machine import machine_of, parse_gpus
from tercet.spec.recipe import load_recipe
from tercet.spec.strategy import Work, not_built, resolve
from tercet.spec.trained import trained_model


def plan_from_files(
    name: str | None,
    overrides: list[str],
    deepspeed: str | None,
    accelerate: str | None,
    machine: dict[str, Any],
    write: str | None = None,
) -> dict[str, Any]:
    """Return the plan of what the files ask for, and beside it what the planner would choose itself.

    `read` holds printable lines, `findings` the keys that do nothing, contradict or are unknown. Without a model
    there is nothing to predict, and only these are returned. `write` names a new Accelerate file to write.
    """
    ranks = machine.get("ranks") or _count(machine.get("gpus"))
    if accelerate:
        found = read_accelerate(read_file(accelerate), accelerate)
        if deepspeed:
            inner = read_deepspeed(read_file(deepspeed), deepspeed, ranks or found.ranks)
            inner.findings = found.findings + inner.findings
            found = inner
    else:
        found = read_deepspeed(read_file(deepspeed or ""), deepspeed or "", ranks)
    ranks = ranks or found.ranks
    found.ranks = ranks
    lines = reading_lines(found)
    if write:
        write_accelerate(found, write, launcher_overrides(found))
        keys = " ".join(launcher_overrides(found))
        lines.append(f"written: {write}; start with:")
        lines.append(f"{COMMAND}accelerate launch --config_file {write} -m tercet train RECIPE {keys}")
    common: dict[str, Any] = {
        "read": lines,
        "findings": [{"key": k, "kind": kind, "says": s} for k, kind, s in found.findings],
        "means": {k: v for k, v in found.__dict__.items() if k not in ("findings", "path")},
    }
    if name is None:
        return {
            **common,
            "strategies": [],
            "refused": [],
            "notes": ["name a model to see what this would take"],
            "assumed": [],
        }
    lines += _conflict_lines(name, overrides, deepspeed)
    if ranks and not machine.get("gpus"):
        machine = {**machine, "ranks": ranks}
    if found.batch and not machine.get("batch"):
        machine = {**machine, "batch": str(found.batch)}
    own = plan(name, list(overrides), **machine)
    asked = as_asked(name, [*overrides, *as_overrides(found)], machine, found)
    return {
        **own,
        **common,
        "read": [*lines, *asked_lines(asked), "What the planner would take instead:"],
        "asked": asked,
    }


def _conflict_lines(name: str, overrides: list[str], deepspeed: str | None) -> list[str]:
    """Return a line per key in which the DeepSpeed file and the recipe differ; none for a bare model."""
    try:
        recipe = load_recipe(name, overrides)
    except InputError:  # a preset or a folder: it says nothing that could be contradicted
        return []
    found = conflicts(read_file(deepspeed), recipe) if deepspeed else []
    return [f"  conflict: {c}" for c in found]


# The options of `tercet plan` that describe a machine.
COMMAND = "    "  # before a line that is to be copied whole
MACHINE = ("gpus", "host_ram", "links", "ranks", "host", "power_limit", "p2p", "disk")


def as_run(found: LauncherFile, precision: str) -> dict[str, Any]:
    """Return what a DeepSpeed file decides of a Job, where our engine would ask DeepSpeed for something else.

    `precision`: the recipe's, with what the file says of it.
    """
    if found.engine != "deepspeed":
        return {}
    narrow = found.sums is None and precision != "fp32" and found.zero > 0
    return {"bucket": found.bucket, **({"gradient_bytes": 2} if narrow else {})}


def as_asked(name: str, overrides: list[str], machine: dict[str, Any], reading: LauncherFile) -> dict[str, Any]:
    """Return what a file's strategy takes as its engine runs it, and `why` it cannot run, if it cannot.

    `ours` is the same strategy as `tercet train` runs it.
    """
    here = machine_of(**{option: machine.get(option) for option in MACHINE})
    recipe, _ = read_recipe(name, overrides, machine.get("sequence"), machine.get("batch"), machine.get("method"))
    work = Work.of(recipe)
    strategy = resolve(recipe.strategy, here.ranks, work)
    file = as_run(reading, work.precision)
    search = Search(Counts(trained_model(recipe)), work, here, load(), file)
    why = not_built(recipe) + refusals(search.counts.model, strategy, work, here)
    candidate = search.candidate(strategy)
    if not search.fits(candidate):
        way = way_for(search, candidate)
        why.append(shortage(search, candidate) + (f"; fits with {way.words}" if way else ""))
    found = predict(recipe, strategy, here, file)
    if strategy.recompute == "none":
        found["recomputing"] = predict(recipe, replace(strategy, recompute="full"), here, file)
    if file:
        found["ours"] = predict(recipe, strategy, here)
    return {**found, "why": list(dict.fromkeys(why))}


def asked_lines(asked: dict[str, Any]) -> list[str]:
    lines = [need_line("As the file runs it", asked)]
    if "recomputing" in asked:
        lines.append(need_line("with strategy.recompute=full", asked["recomputing"]))
    if "ours" in asked and asked["ours"]["card_bytes"] != asked["card_bytes"]:
        lines.append(need_line("as tercet train runs it (gradients added up and sent in fp32)", asked["ours"]))
    return lines + [f"  refused: {w}" for w in asked["why"]]


def _count(gpus: str | None) -> int | None:
    return len(parse_gpus(gpus)) if gpus else None


def as_overrides(found: LauncherFile) -> list[str]:
    """Return the reading as recipe overrides."""
    result = [
        f"strategy.zero={found.zero}",
        f"strategy.offload.optimizer={found.offload_optimizer}",
        f"strategy.offload.weights={found.offload_weights}",
    ]
    if found.nvme_path:
        result.append(f"strategy.offload.nvme_path={found.nvme_path}")
    if found.engine == "deepspeed":
        result.append("strategy.engine=deepspeed")
    if found.micro_batch:
        result.append(f"strategy.micro_batch={found.micro_batch}")
    if found.recompute:
        result.append(f"strategy.recompute={found.recompute}")
    if found.precision:
        result.append(f"train.precision={found.precision}")
    return result


def launcher_overrides(found: LauncherFile) -> list[str]:
    """Return the recipe keys that make a recipe run what an Accelerate file with DeepSpeed asks for."""
    keys = [k for k in as_overrides(found) if not k.endswith("=none") and not k.startswith("strategy.engine")]
    return ["strategy.engine=deepspeed", *keys]


def reading_lines(found: LauncherFile) -> list[str]:
    words = [f"zero {found.zero}"]
    if found.offload_optimizer != "none":
        words.append(f"optimizer on {found.offload_optimizer}")
    if found.offload_weights != "none":
        words.append(f"weights on {found.offload_weights}")
    if found.precision:
        words.append(found.precision)
    if found.engine == "deepspeed" and found.zero and found.precision != "fp32":
        words.append("gradients added up and sent in " + (found.sums or found.precision or "16 bits"))
    if found.batch:
        words.append(
            f"batch {found.batch} = micro-batch {found.micro_batch} x accumulation {found.accumulation} x "
            f"{found.ranks or 1} ranks"
        )
    elif found.accumulation:
        words.append(f"accumulation {found.accumulation}")
    lines = [f"{found.path} means: {', '.join(words)}"]
    return lines + [f"  {kind}: {sentence}" for _, kind, sentence in found.findings]
