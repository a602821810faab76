"""The planner's answers: `plan` for people and scripts, `choose` for `train`, `ledger_for` for both.

Only here does the planner read a recipe; search, ledger and clock see its parts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any

from tercet.errors import InputError, NotLegalError, nearest
from tercet.planner.clock import collectives, model_flops
from tercet.planner.constants import about, load_for
from tercet.planner.disk import disk_of, disk_refusal, short_of_disk
from tercet.planner.ledger import host_rows, ledger_for, phases, saves_behind
from tercet.planner.legal import formats, refusals
from tercet.planner.longest import longest_sequence
from tercet.planner.notes import notes
from tercet.planner.ranges import spread, within
from tercet.planner.search import Candidate, Refusal, Search, moments_of
from tercet.planner.ways import WaysOut, hint_for_train, offered, shortage, way_for
from tercet.planner.what_if import what_if as other_values
from tercet.spec.adapter import with_adapter
from tercet.spec.counts import Counts
from tercet.spec.families import HUB, describe, hub_name, presets
from tercet.spec.kernels import attention_kernel
from tercet.spec.machine import Machine, machine_file, machine_of, this_machine
from tercet.spec.model import Model
from tercet.spec.recipe import (
    AdapterSection,
    Recipe,
    build_recipe,
    load_recipe,
    refuse_idle_for,
    shipped_recipes,
    with_place,
)
from tercet.spec.strategy import Strategy, Work, not_built, ranks_of, resolve
from tercet.spec.trained import adapter_of, trained_model
from tercet.units import count_of, show_bytes

__all__ = ["choose", "ledger_for", "plan", "plan_for_run", "predict"]

DEFAULT_BATCH = 96  # divisible by 1, 2, 3, 4, 6 and 8 cards
DEFAULT_SEQUENCE = 2048
HOST_WATTS = 150  # processor, memory, drives and fans while cards work (an assumption)
SUPPLY_SHARE = 0.9  # of the socket's power that a good supply hands on (an assumption: 80 PLUS Gold)
SHOWN = 12  # strategies in an answer; so many refusals say what would make them fit


def plan(
    recipe: str | Path,
    overrides: list[str] | None = None,
    *,
    gpus: str | None = None,
    host_ram: str | int | None = None,
    links: str | None = None,
    ranks: int | None = None,
    host: str | None = None,
    power_limit: str | None = None,
    p2p: bool | None = None,
    disk: str | int | None = None,
    sequence: int | str | None = None,
    batch: int | str | None = None,
    method: str | None = None,
    price: float | None = None,
    kwh_price: float | None = None,
    margin: float = 0.0,
    what_if: list[str] | None = None,
) -> dict[str, Any]:
    """Return what `tercet plan … --json` prints: {"strategies": [...], "refused": [...], …}, best first.

    `recipe` is a recipe (file or shipped name) or a model (preset, folder with config.json, hub name). `price` is
    per card and hour; `kwh_price` per kWh; `margin` is the share of each card's memory to leave free; `what_if`
    names what to try other values of (planner/what_if.py); the other keys are the command's options. Raises InputError for unknown names, cards and impossible sizes.
    """
    described = machine_of(gpus, host_ram, links, ranks, host=host, power_limit=power_limit, p2p=p2p, disk=disk)
    machine = described.leaving(margin)
    try:
        read, assumed = read_recipe(recipe, list(overrides or []), sequence, batch, method)
        answer = answer_for(read, machine, price, kwh_price, ahead=True)
    except InputError as error:
        raise with_place(error, recipe, overrides or [], always=is_recipe(recipe)) from None
    if what_if and not answer["not_built"]:
        answer["what_if"] = other_values(
            Search(Counts(trained_model(read)), Work.of(read), machine, load_for(machine)),
            read.strategy,
            min(ranks_of(read.strategy, machine.ranks), machine.ranks),
            what_if,
        )
    if gpus is None and disk is None and answer["strategies"]:
        answer["notes"] += _short_here(answer["strategies"][0]["disk_bytes"])
    if gpus is None:
        where = f"cards: this machine's, {machine.describe()}"
        if machine.measured:
            where += f", measured by tercet doctor ({machine_file()})"
        if machine.corrections:
            where += ", corrected by its finished runs (tercet calibrate)"
        assumed.insert(0, where + (" (--ranks, or describe others with --gpus 3x4090)" if ranks is None else ""))
    if machine.host_limit is not None:
        assumed.append(
            f"host RAM {show_bytes(machine.host_bytes or 0)}: less than the machine has, by {machine.host_limit}"
        )
    if machine.host_bytes is None:
        assumed.append("host RAM unknown: shown as a need, not checked (--host-ram 128GB)")
    if machine.card is not None and machine.lanes is None and machine.ranks > 1:
        assumed.append(f"every card in a slot of x{machine.card.pcie_lanes or '?'} lanes (--links x16,x8,x4)")
    if machine.host is not None:
        assumed.append(machine.host.describe())
    if margin:
        assumed.append(f"{margin:.0%} of each card's memory is left free (--margin)")
    answer["assumed"] = [*machine.notes, *assumed]
    return answer


def _short_here(need: int) -> list[str]:
    free = disk_usage(Path.cwd()).free
    if need <= free:
        return []
    return [f"checkpoints, model and files need {show_bytes(need)} of disk; {show_bytes(free)} are free here"]


def plan_for_run(recipe: Recipe, ranks: int | None = None) -> tuple[dict[str, Any], Strategy]:
    """Return (a run's plan.json, its strategy) on this machine: all its cards, or three processes on a CPU.

    Raises NotLegalError when nothing fits.
    """
    machine = this_machine(ranks)
    if ranks is None:
        ranks = ranks_of(recipe.strategy, machine.ranks)
    if machine.card is not None and ranks > machine.ranks:
        raise NotLegalError([f"{ranks} ranks, but this machine has {machine.ranks} cards"])
    strategy, answer = choose(recipe, machine, ranks)
    return answer, strategy


def choose(recipe: Recipe, machine: Machine, ranks: int) -> tuple[Strategy, dict[str, Any]]:
    """Return the best strategy that the recipe leaves open on `ranks` workers, and its plan (a run's plan.json).

    What the recipe's strategy section fixes stays fixed. Raises NotLegalError with one sentence per reason when
    nothing fits or something asked for is not built.
    """
    answer = answer_for(recipe, machine.with_ranks(ranks), deepspeed=find_spec("deepspeed") is not None)
    if not answer["strategies"]:
        why = [f"{r['name']}: {w}" if r["name"] else w for r in answer["refused"][:4] for w in r["why"]]
        raise NotLegalError(why or ["no strategy is legal"], hint_for_train(answer["ways_out"]))
    first = answer["strategies"][0]
    rest = {k: v for k, v in answer.items() if k not in ("strategies", "refused")}
    return Strategy(**first["strategy"]), {**rest, **first, "ranks": ranks}


# --------------------------------------------------------------------------------------------- what is asked for


def read_recipe(
    name: str | Path,
    overrides: list[str],
    sequence: int | str | None,
    batch: int | str | None,
    method: str | None,
) -> tuple[Recipe, list[str]]:
    """Return the recipe and what was assumed. A bare model becomes a recipe with the defaults below."""
    extra = []
    if sequence is not None:
        extra.append(f"data.sequence_tokens={sequence}")
    if batch is not None:
        extra.append(f"train.batch_sequences={batch}")
    if method in ("lora", "qlora"):
        extra.append("adapter.kind=lora")
        extra += ["adapter.quantize=nf4"] if method == "qlora" else []
    elif method not in (None, "full", "pretrain"):
        raise InputError(f"--method {method!r} is not one of full, lora, qlora, pretrain")
    if is_recipe(name):
        return load_recipe(name, [*overrides, *extra]), []
    tree: dict[str, Any] = {"name": Path(str(name)).name, "model": str(name), "data": {"train": "-"}}
    assumed = []
    keys = {o.partition("=")[0].strip() for o in [*overrides, *extra]}
    if "train.batch_sequences" not in keys:
        tree["train"] = {"batch_sequences": str(DEFAULT_BATCH)}
        assumed.append(f"{DEFAULT_BATCH} sequences per optimizer step (--batch)")
    if "data.sequence_tokens" not in keys:
        tokens = min(DEFAULT_SEQUENCE, describe(build_recipe(dict(tree), overrides).model).context_tokens)
        tree["data"]["sequence_tokens"] = str(tokens)
        assumed.append(f"{tokens} tokens per sequence (--sequence)")
    read = build_recipe(tree, [*overrides, *extra])
    if read.adapter.kind != "none":
        if hub := hub_name(str(name)):  # an adapter stands on weights, which a preset does not bring
            read = build_recipe({**tree, "model": hub}, [*overrides, *extra])
        base = "nf4" if read.adapter.quantize == "nf4" else "bf16"
        assumed.append(f"adapters of rank {read.adapter.rank} on {read.adapter.targets}, fp32, beside a {base} base")
    elif "train.precision" not in keys:
        moments = "fp32" if read.optim.name == "adamw" else "eight bits"
        assumed.append(f"bf16 weights with fp32 master copies, AdamW in {moments} (train.precision=, optim.name=)")
    if method is None and read.adapter.kind == "none":
        assumed.append("all parameters are trained (--method)")
    return read, assumed


def is_recipe(name: str | Path) -> bool:
    """Whether a name means a recipe rather than a model. Raises InputError when it is neither."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.is_dir():
        return False
    if path.is_file():
        return path.suffix != ".json"
    text = str(name)
    if text in shipped_recipes():
        return True
    if text in presets() or text.lower() in HUB or text.startswith("package:"):
        return False
    if "/" in text:
        return False  # a hub name or a folder: describe() says what is wrong with it
    known = [*shipped_recipes(), *presets()]
    raise InputError(
        f"{text!r} is neither a recipe, nor a preset, nor a file or folder here{nearest(text, known)}",
        f"Recipes: {', '.join(shipped_recipes())}. Presets: {', '.join(presets())}.",
    )


# ------------------------------------------------------------------------------------------------------ answers


def answer_for(
    recipe: Recipe,
    machine: Machine,
    price: float | None = None,
    kwh_price: float | None = None,
    deepspeed: bool = True,
    ahead: bool = False,
) -> dict[str, Any]:
    """Return the answer for a recipe on a machine.

    `deepspeed`: whether its engine may be chosen unasked. `ahead`: whether files on NVMe are ranked too.
    """
    base, model = describe(recipe.model), trained_model(recipe)
    refuse_idle_for(recipe, model)
    counts, work = Counts(model), Work.of(recipe)
    search = Search(counts, work, machine, load_for(machine))
    missing = not_built(recipe) + formats(work, machine)
    section = recipe.strategy
    ranks = min(ranks_of(section, machine.ranks), machine.ranks)
    found = None if missing else search.run(section, ranks, deepspeed, files=ahead)
    fits = [c for c in found.fits if not short_of_disk(search, c, recipe)] if found else []
    no_room = [c for c in found.fits if c not in fits] if found else []
    strategies = [entry(search, c, recipe, price, kwh_price) for c in fits[:SHOWN]]
    look = bool(strategies) or not search.open_for_offload(section)
    refused = [refusal(search, r, look and n < SHOWN) for n, r in enumerate(found.refused)] if found else []
    refused = [disk_refusal(search, c, recipe) for c in no_room] + refused
    ways = []
    if no_room and not strategies:
        ways = [r["way_out"] for r in refused[:1]]
    elif found and not strategies:
        quantised = _quantised(base) if ahead and model == base else None
        ways = offered(WaysOut(search, section, ranks).all(quantised), _tokens_of(recipe))
    if missing:
        refused = [_asked_for(search, recipe, ranks, missing)]
    return {
        "model": {
            "name": model.name,
            "parameters": base.parameters,
            "active_parameters": base.active_parameters,
            "trained_parameters": counts.trained_parameters,
            "layers": len(model.layers),
        },
        "weights": recipe.model.start,
        "work": {
            "sequence_tokens": work.sequence_tokens,
            "batch_sequences": work.batch_sequences,
            "precision": work.precision,
            "optimizer": work.optimizer,
            "tokens_per_step": work.sequence_tokens * work.batch_sequences,
        },
        "machine": machine_json(machine),
        "strategies": strategies,
        "longest": longest_sequence(search, fits) if fits else None,
        "attention": attention_of(model, work.precision, machine),
        "refused": refused,
        "not_built": missing,
        "notes": notes(search, fits[:SHOWN], recipe, ranks),
        "ways_out": ways,
        "error_bars": error_bars(machine),
    }


def _tokens_of(recipe: Recipe) -> float:
    """Return the tokens of the recipe's steps, or the billion that costs are told for where it names no steps."""
    work, steps = Work.of(recipe), recipe.train.steps
    return 1e9 if steps is None else float(steps * work.sequence_tokens * work.batch_sequences)


def _quantised(base: Model) -> Counts | None:
    """Return the model with the usual adapters beside matrices in nf4; None for one that is not held so."""
    try:
        return Counts(with_adapter(base, adapter_of(AdapterSection(kind="lora", quantize="nf4"))))
    except InputError:
        return None


def refusal(search: Search, refused: Refusal, look: bool) -> dict[str, Any]:
    """Return a refused strategy: why, what is short, and where `look`, the fewest changes with which it fits."""
    found: dict[str, Any] = {
        "name": label(refused.strategy),
        "strategy": asdict(refused.strategy),
        "why": refused.why,
        "short": None,
        "way_out": None,
    }
    if refused.tried is not None:
        found["short"] = dict(zip(("card_bytes", "host_bytes"), search.overflow(refused.tried), strict=True))
        way = way_for(search, refused.tried) if look else None
        found["way_out"] = way.to_json() if way else None
        found["why"] = [shortage(search, refused.tried) + (f"; fits with {way.words}" if way else "")]
    return found


def _asked_for(search: Search, recipe: Recipe, ranks: int, missing: list[str]) -> dict[str, Any]:
    """Return the refusal of what is not built, with what it would take as far as the ledger knows it."""
    strategy = resolve(recipe.strategy, ranks, search.work)
    why = missing + refusals(search.counts.model, strategy, search.work, search.machine)
    entry: dict[str, Any] = {
        "name": label(strategy),
        "strategy": asdict(strategy),
        "why": list(dict.fromkeys(why)),
    }
    if recipe.adapter.kind == "none":
        entry["would_need"] = would_need(search, strategy)
        if strategy.recompute == "none":
            entry["would_need_recomputing"] = would_need(search, replace(strategy, recompute="full"))
    return entry


def would_need(search: Search, strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy takes, whether or not it is built or fits."""
    candidate = search.candidate(strategy)
    return {
        "ledger": moments_of(search, candidate)["peak"],
        "host": host_rows(search.counts, candidate.job, search.machine.card is None, search.machine.host_bytes),
        "card_bytes": candidate.need,
        "tokens_per_second": candidate.tokens_per_second,
    }


def label(strategy: Strategy) -> str:
    """Return a strategy's name as the table shows it and as `strategy=` reads it: zero3+full+optimizer-cpu."""
    return strategy.word


def entry(
    search: Search, candidate: Candidate, recipe: Recipe, price: float | None, kwh_price: float | None
) -> dict[str, Any]:
    """Return one strategy's predictions in full."""
    counts, work, machine = search.counts, search.work, search.machine
    strategy, job = candidate.strategy, candidate.job
    on_gpu = machine.card is not None
    both = moments_of(search, candidate)
    host = host_rows(counts, job, not on_gpu, machine.host_bytes)
    disk = disk_of(search, candidate, recipe)
    seconds = candidate.seconds
    found: dict[str, Any] = {
        "name": label(strategy),
        "strategy": asdict(strategy),
        "micro_batch": strategy.micro_batch,
        "accumulation": job.accumulation,
        "idle_rows": strategy.idle_rows(work.batch_sequences),
        "recompute": strategy.recompute,
        "offload": sorted(job.offload),
        "precision": work.precision,
        "ledger": both["peak"],
        "moments": both,
        "phases": phases(counts, job, search.constants, on_gpu=on_gpu),
        "card_bytes": candidate.need,
        "usable_bytes": machine.worker_bytes,
        "host": host,
        "host_bytes": candidate.host_need,
        "saves_behind_steps": saves_behind(counts, job, not on_gpu, machine.host_bytes),
        "disk": disk,
        "disk_bytes": sum(disk.values()),
        "traffic": {f"{x.kind} {x.what}": int(x.payload) for x in collectives(counts, job)},
        "step_seconds": seconds,
        "clock": candidate.rows,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": None,
        "communication_share": None,
        "out_of_memory_chance": search.chance(candidate),
        "ranges": ranges_of(candidate, search),
    }
    if seconds and candidate.rows:
        found["communication_share"] = (candidate.rows["communication"] + candidate.rows["host"]) / seconds
        if machine.card is not None:
            found["mfu"] = model_flops(counts, job) / seconds / (machine.card.plain_flops * strategy.ranks)
        found.update(costs(recipe, machine, candidate, price, kwh_price))
    return found


def ranges_of(candidate: Candidate, search: Search) -> dict[str, list[float]] | None:
    """Return the ranges that hold four of five measured figures; None on a CPU."""
    half = spread(candidate.job, search.machine)
    if half is None:
        return None
    found = {"card_bytes": within(candidate.need, half.memory)}
    if candidate.seconds and candidate.tokens_per_second:
        found["step_seconds"] = within(candidate.seconds, half.speed)
        found["tokens_per_second"] = within(candidate.tokens_per_second, half.speed)
    return found


def costs(
    recipe: Recipe, machine: Machine, candidate: Candidate, price: float | None, kwh_price: float | None
) -> dict[str, Any]:
    """Return time, energy and money of the recipe's steps, or of a billion tokens where it names no steps."""
    seconds, work = candidate.seconds or 0.0, Work.of(recipe)
    per_step = work.sequence_tokens * work.batch_sequences
    steps = recipe.train.steps
    count = steps if steps is not None else 1e9 / per_step
    total = seconds * count
    found: dict[str, Any] = {
        "for": count_of(steps, "step") if steps is not None else "a billion tokens",
        "total_seconds": total,
    }
    card = machine.card
    if card is not None:
        if card.watts:
            watts = (card.watts * candidate.strategy.ranks + HOST_WATTS) / SUPPLY_SHARE
            found["kwh"] = watts * total / 3.6e6  # cards at their power limit
            if kwh_price is not None:
                found["energy_money"] = found["kwh"] * kwh_price
        hours = total / 3600 * candidate.strategy.ranks
        if price is not None:
            found["money"] = price * hours
        elif card.rent_usd_per_hour:
            found["rent_usd"] = [round(p * hours, 2) for p in card.rent_usd_per_hour]
    return found


def attention_of(model: Model, precision: str, machine: Machine) -> list[dict[str, Any]]:
    """Return the attention kernels that the layers run on this machine: {kernel, head_size, runs_at, layers}."""
    if model.module == "transformers":  # its own modules choose
        return []
    found: Counter[tuple[str, int, int]] = Counter()
    for _, layer in model.blocks():
        size = max(layer.attention.attention_widths) // layer.attention.heads
        kernel, runs_at = attention_kernel(machine.card is not None, precision != "fp32", size)
        found[kernel, size, runs_at] += 1
    return [{"kernel": k, "head_size": s, "runs_at": r, "layers": n} for (k, s, r), n in found.items()]


def machine_json(machine: Machine) -> dict[str, Any]:
    card = machine.card
    return {
        "kind": machine.kind,
        "ranks": machine.ranks,
        "card": card.name if card else None,
        "usable_bytes": machine.worker_bytes,
        "host_bytes": machine.host_bytes,
        "host_limit": machine.host_limit,
        "links_bytes_per_s": list(machine.host_links()),
        "peer_access": machine.peers if card else None,
        "cards": [c.name for c in machine.cards],
        "watts": card.watts if card else None,
        "host": machine.host.describe() if machine.host else None,
        "disk_bytes": machine.disk_bytes,
        "measured": machine.measured,
        "measured_at": machine.measured_at,
        "notes": list(machine.notes),
    }


def error_bars(machine: Machine) -> dict[str, Any]:
    """Return how far predictions have been from measurements (cross-validated; bench/plan_truth.py)."""
    known = about()
    return {
        "tokens_per_second_90_percent": known.get("tokens_p90"),
        "memory_90_percent": known.get("memory_p90"),
        "runs": known.get("rows"),
        "measured_machine": bool(machine.measured),
    }


def predict(
    recipe: Recipe, strategy: Strategy, machine: Machine, as_run: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the plan of a strategy that is given, whether it fits or not; `as_run`: see Search."""
    counts = Counts(trained_model(recipe))
    search = Search(counts, Work.of(recipe), machine.with_ranks(strategy.ranks), load_for(machine), as_run)
    return entry(search, search.candidate(strategy), recipe, None, None)
