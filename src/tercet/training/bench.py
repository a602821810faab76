"""tercet bench: the same recipe on 1, 2, … N ranks and under several strategies, measured beside the prediction."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tercet.errors import NotLegalError
from tercet.spec.recipe import load_recipe
from tercet.spec.run_folder import RunFolder, read_json
from tercet.training import supervise
from tercet.training.preflight import make_plan

PROFILED_STEPS = 3  # at the end, and not among those that are timed: a profiler costs time
SHARE_FILE = "communication.json"
QUIET = ("train.evaluate_every=0", "train.sample_every=0", "train.sample_prompts=[]", "output.checkpoint_every=0")


def bench(
    recipe: str,
    overrides: Sequence[str],
    ranks: Sequence[int],
    strategies: Sequence[str],
    steps: int,
    warm_up: int,
    per_rank: bool,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run every combination and return the table as data.

    strategies: words for strategy=, or nothing for the recipe's own. `per_rank` lets the effective batch grow
    with the ranks, the recipe's being that of the most ranks; otherwise every row does the same work.
    """
    own = load_recipe(recipe, overrides)
    batch = own.train.batch_sequences
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    seen: list[Any] = []
    for word in strategies or [""]:
        for n in ranks:
            keys = [*overrides, *([f"strategy={word}"] if word else []), *QUIET]
            total = warm_up + steps + PROFILED_STEPS + 1
            # A rate that rises longer than the run lasts would be remarked on; at the start it is small in any case.
            keys += [f"train.steps={total}", f"optim.warmup_steps={min(own.optim.warmup_steps, total // 2)}"]
            if per_rank:
                keys.append(f"train.batch_sequences={max(1, round(batch * n / max(ranks)))}")
            name = f"{word or 'recipe'}-{n}"
            if n == 1 and _same_alone(recipe, keys, seen):
                continue
            say(f"{name}: {warm_up + steps} steps on {n} rank{'s' if n > 1 else ''} …")
            try:
                run = supervise.train(
                    recipe, keys, ranks=n, output=str(folder / name), watch=(warm_up + steps + 1, PROFILED_STEPS)
                )
            except NotLegalError as error:
                refused.append({"strategy": word or "recipe", "ranks": n, "why": str(error)})
                say(f"  refused: {error}")
                continue
            rows.append(row_of(RunFolder(run), n, warm_up, steps))
            for left in (RunFolder(run).checkpoints, RunFolder(run).model):  # only figures are kept
                shutil.rmtree(left, ignore_errors=True)
    add_efficiency(rows)
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "steps": steps,
        "warm_up": warm_up,
        "per_rank": per_rank,
        "rehearsal": any(row["device"] == "cpu" for row in rows),
        "rows": rows,
        "refused": refused,
    }


def _same_alone(recipe: str, keys: Sequence[str], seen: list[Any]) -> bool:
    """Whether one rank has been measured with this layout already: there, ddp and zero are the same."""
    try:
        strategy = make_plan(load_recipe(recipe, keys), 1, lambda text: None)["strategy"]
    except NotLegalError:
        return False
    known = strategy in seen
    seen.append(strategy)
    return known


def row_of(run: RunFolder, ranks: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Return what one run measured; medians over the steps after the warm-up, without the profiled ones."""
    plan, summary = run.read_plan() or {}, run.read_summary() or {}
    timed = [e for e in run.read_events() if e["event"] == "step" and warm_up < e["step"] <= warm_up + steps]
    rates = sorted(e["tokens_per_second"] for e in timed)
    speed = statistics.median(rates)
    quarters = statistics.quantiles(rates, n=4) if len(rates) > 1 else [speed, speed, speed]
    predicted = plan.get("tokens_per_second")
    mfu = plan.get("mfu")
    share = read_json(run.path / SHARE_FILE)["share"] if (run.path / SHARE_FILE).exists() else None
    return {
        "strategy": plan["name"],
        "ranks": ranks,
        "micro_batch": plan["micro_batch"],
        "accumulation": plan["accumulation"],
        "device": summary["device"],
        "tokens_per_second": speed,
        "quartiles": [quarters[0], quarters[2]],
        "step_seconds": statistics.median(e["seconds"] for e in timed),
        # Rank 0's at the last of them: a profiler holds memory too, and the summary's peak has it.
        "peak_bytes": timed[-1].get("memory_bytes") or max(summary["peak_bytes_per_rank"]),
        # A card's peak is a data sheet's number: the prediction holds it, so the ratio of speeds gives ours.
        "mfu": mfu * speed / predicted if mfu and predicted and summary["device"] != "cpu" else None,
        "communication_share": share if ranks > 1 else 0.0,
        "predicted_tokens_per_second": predicted,
        "predicted_bytes": plan.get("card_bytes"),
        "predicted_communication_share": plan.get("communication_share"),
        "loss": summary["train_loss"],
    }


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Set each row's speed over that of one rank times its ranks: the fastest row of one rank, or None without."""
    alone = [row["tokens_per_second"] for row in rows if row["ranks"] == 1]
    for row in rows:
        row["efficiency"] = row["tokens_per_second"] / (max(alone) * row["ranks"]) if alone else None
