"""The words and figures of a report, for the page and the console alike: what a Story says."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tercet.report.cards import card_facts, card_warnings
from tercet.report.compare import MOMENTS, ComparedRow, device_of, number, predicted_rows
from tercet.report.sources import source_rows
from tercet.report.story import Story
from tercet.spec.run_folder import RunFolder
from tercet.units import count_of, show_bytes, show_count, show_seconds

MISSING = "–"
CLOSE, NEAR = 0.05, 0.20  # relative errors that are coloured as good and as tolerable
STATES = {
    "finished": ("finished", "good"),
    "interrupted": ("interrupted, saved", "warn"),
    "failed": ("failed", "bad"),
    "running": ("running", ""),
    "unfinished": ("not finished", "warn"),
    "not started": ("not started", "warn"),
}
TOKENIZERS = {"model": "the model's", "train": "trained on the data"}
GROUPS = {
    "between steps": "Memory of a rank between steps",
    "at the peak": "Memory of a rank at the peak",
    "time": "Time",
}
# Not printable: they would vanish or, in markup, be no character at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def plain(value: Any) -> str:
    """Return a text without characters that a page cannot hold: each becomes the replacement character."""
    return _CONTROL.sub("\ufffd", str(value).replace("\r\n", "\n"))


def show_loss(value: float | None, missing: str = MISSING) -> str:
    return missing if value is None else f"{value:.4f}"


def moment_of(seconds: float | None) -> str:
    """Return a time as 2026-01-31 14:05 UTC."""
    return MISSING if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def state_of(story: Story) -> dict[str, str]:
    word, style = STATES[story.state]
    return {"word": word, "style": style}


def _section(story: Story, name: str) -> dict[str, Any]:
    section = story.recipe.get(name)
    return section if isinstance(section, dict) else {}


def _plan_strategy(story: Story) -> dict[str, Any]:
    strategy = story.plan.get("strategy")
    return strategy if isinstance(strategy, dict) else {}


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def ranks_of(story: Story) -> int | None:
    newest = story.sessions[-1].ranks if story.sessions else None
    return _first(newest, number(_plan_strategy(story).get("ranks")))


def strategy_of(story: Story) -> str | None:
    newest = story.sessions[-1].strategy if story.sessions else None
    return _first(newest, _plan_strategy(story).get("name"), story.plan.get("name"))


def model_of(story: Story) -> str:
    """Return the model's name: preset or path, else the family that its sizes describe."""
    model, described = _section(story, "model"), story.plan.get("model")
    name = described.get("name") if isinstance(described, dict) else None
    return plain(name or model.get("preset") or model.get("path") or f"{model.get('family') or 'llama'}-style")


def _sources(value: Any) -> str:
    if not isinstance(value, list):
        return ""
    return ", ".join(plain(s.get("path", "?") if isinstance(s, dict) else s) for s in value)


def lead_of(story: Story) -> str:
    """Return the one sentence that says what ran."""
    size = f", {show_count(story.parameters)} parameters" if story.parameters else ""
    ranks, strategy = ranks_of(story), strategy_of(story)
    where = f" with {plain(strategy)}" if strategy else ""
    where += f" on {count_of(ranks, 'rank')}" if ranks else ""
    precision = _section(story, "train").get("precision")
    done = story.headline["steps"]
    steps = (
        f"{done} of {story.total_steps} steps"
        if story.total_steps and done < story.total_steps
        else count_of(done, "step")
    )
    return f"{model_of(story)}{size}; {steps}{where}{f' in {plain(precision)}' if precision else ''}."


def notes_of(story: Story) -> list[dict[str, str]]:
    notes = []
    if story.failure:
        notes.append({"style": "bad", "text": plain(story.failure)})
    notes += [{"style": "bad", "text": plain(text)} for text in card_warnings(story.cards)]
    if story.state == "running":
        notes.append(
            {
                "style": "",
                "text": "Running when this page was made, or ended by force: run.lock is still there.",
            }
        )
    if story.state in ("interrupted", "failed", "unfinished") and any(c.fault is None for c in story.checkpoints):
        newest, folder = [c for c in story.checkpoints if c.fault is None][-1], plain(story.run.path.name)
        notes.append(
            {
                "style": "",
                "text": f"{RunFolder(Path(folder)).resume} goes on after step {newest.step}.",
            }
        )
    if story.damaged_lines:
        lines = ", ".join(map(str, story.damaged_lines[:8])) + (", …" if len(story.damaged_lines) > 8 else "")
        many = len(story.damaged_lines) > 1
        which = f"lines {lines} could not be read and are" if many else f"line {lines} could not be read and is"
        notes.append({"style": "bad", "text": f"events.jsonl: {which} missing here."})
    return notes


def tiles_of(story: Story) -> list[dict[str, str]]:
    """Return the headline figures {name, value, small}; what was never measured has no tile."""
    h, tiles = story.headline, []

    def add(name: str, value: str | None, small: str = "") -> None:
        if value is not None:
            tiles.append({"name": name, "value": value, "small": small})

    if h["validation_loss"] is not None:
        best, small = h["best_validation_loss"], "nats per token"
        if best is not None and best < h["validation_loss"]:
            small = f"best {show_loss(best)} at step {h['best_validation_step']}"
        add("Validation loss", show_loss(h["validation_loss"]), small)
        perplexity = h["perplexity"]
        add("Perplexity", None if perplexity is None else f"{perplexity:.4g}", "exp of validation loss")
    add("Train loss", show_loss(h["train_loss"]) if h["train_loss"] is not None else None, "last step")
    if h["tokens_per_second"] is not None:
        counts = {s.ranks for s in story.sessions}
        ranks = (
            counts.pop() if len(counts) == 1 else None
        )  # the figure spans sessions: per rank only when all are alike
        small = f"{show_count(h['tokens_per_second'] / ranks)} per rank" if ranks and ranks > 1 else ""
        add("Tokens/s", show_count(h["tokens_per_second"]), small)
    add("Trained tokens", show_count(h["tokens"]) if h["tokens"] else None, count_of(h["steps"], "step"))
    sessions = h["sessions"]
    add(
        "Time",
        show_seconds(h["seconds"]) if h["seconds"] else None,
        f"in {sessions} sessions" if sessions > 1 else "",
    )
    if h["peak_bytes"] is not None:
        kind = {"cpu": "resident, whole process", "cuda": "allocated on the card"}
        small = kind.get(device_of(story.plan, story.summary), "fullest rank")
        add("Peak memory", show_bytes(h["peak_bytes"]), small)
    return tiles


def facts_of(story: Story) -> list[dict[str, str]]:
    """Return what ran as {name, value}, from the recipe, the plan and the events, as far as they say."""
    model, data = _section(story, "model"), _section(story, "data")
    optim, train = _section(story, "optim"), _section(story, "train")
    words = [
        ("layers", "layers"),
        ("width", "wide"),
        ("heads", "heads"),
        ("kv_heads", "key-value heads"),
        ("ffn", "in the feed-forward"),
        ("experts", "experts"),
    ]
    sizes = [f"{model[key]} {word}" for key, word in words if model.get(key) is not None]
    sizes += [f"vocabulary {model['vocabulary']}"] if model.get("vocabulary") is not None else []
    layout = _plan_strategy(story)
    ranks, strategy = ranks_of(story), strategy_of(story)
    batch, length = number(train.get("batch_sequences")), number(data.get("sequence_tokens"))
    validation = data.get("validation")
    validation = f"{validation:g} of the documents" if number(validation) is not None else _sources(validation)
    lr, warm_up = number(optim.get("lr")), optim.get("warmup_steps")
    rows = [
        ("Model", [model_of(story), *sizes]),
        ("Parameters", [f"{story.parameters:,}".replace(",", " ") if story.parameters else None]),
        ("Strategy", [strategy, count_of(ranks, "rank") if ranks else None, *_layout(layout)]),
        ("Machine", [_machine(story.plan.get("machine"))]),
        ("Cards", card_facts(story.cards)),
        ("Precision", [train.get("precision")]),
        ("Data", [_sources(data.get("train")), *_found(story, "train")]),
        ("Validation", [validation or "none", *_found(story, "validation")]),
        ("Tokenizer", [TOKENIZERS.get(str(data.get("tokenizer")), data.get("tokenizer"))]),
        ("Batch", [f"{batch:g} sequences" if batch else None, f"{length:g} tokens each" if length else None]),
        ("Optimizer", [optim.get("name"), f"learning rate {lr:g}" if lr is not None else None]),
        ("Schedule", [optim.get("schedule"), f"{warm_up} warm-up steps" if warm_up else None]),
        ("Seed", [train.get("seed")]),
        ("Started", [moment_of(story.sessions[0].began) if story.sessions else None]),
    ]
    joined = ((name, ", ".join(plain(v) for v in values if v not in (None, ""))) for name, values in rows)
    return [{"name": name, "value": value} for name, value in joined if value]


def _machine(machine: Any) -> str | None:
    """Return the machine as the plan describes it: 3 x RTX 4090, or CPU."""
    if not isinstance(machine, dict) or "kind" not in machine:
        return None
    if machine["kind"] == "cpu":
        return "CPU"
    card, ranks = machine.get("card") or "unknown card", number(machine.get("ranks"))
    return f"{ranks} × {card}" if ranks else str(card)


def _layout(layout: dict[str, Any]) -> list[str]:
    parts = [
        f"{axis} {n:g}"
        for axis in ("tensor", "pipeline", "expert", "context")
        if (n := number(layout.get(axis)) or 1) > 1
    ]
    if layout.get("micro_batch") is not None:
        parts.append(f"micro-batch {layout['micro_batch']}")
    if layout.get("recompute") not in (None, "none"):
        parts.append(f"recompute {layout['recompute']}")
    parts += [
        f"{what} on {layout[f'offload_{what}']}"
        for what in ("optimizer", "weights", "activations")
        if layout.get(f"offload_{what}") not in (None, "none")
    ]
    return parts + (["compiled"] if layout.get("compile") is True else [])


def _found(story: Story, part: str) -> list[str]:
    """Return what preparing found in a part, train or validation: documents, tokens, rows dropped."""
    figures = ((what, story.data.get(what)) for what in ("documents", "tokens"))
    found = [
        f"{show_count(n)} {what}" for what, both in figures if isinstance(both, dict) and (n := number(both.get(part)))
    ]
    rows = story.data.get("rows")
    dropped = number(rows.get("dropped")) if part == "train" and isinstance(rows, dict) else None
    return found + ([f"{show_count(dropped)} rows dropped"] if dropped else [])


# ---------------------------------------------------------------------------------- plan beside measured


def show_value(value: float | None, unit: str) -> str:
    """Return a figure in its unit, or what stands for one that is missing."""
    if value is None:
        return MISSING
    if unit == "bytes":
        return show_bytes(value)
    return f"{value:.3g} s" if unit == "s" and value < 10 else show_seconds(value) if unit == "s" else show_count(value)


def show_range(row: ComparedRow) -> str:
    """Return the plan's range behind its figure: " (4.7 k to 8.6 k)"; nothing where it has none."""
    if not row.get("range"):
        return ""
    low, high = (show_value(float(f"{v:.2g}"), row["unit"]) for v in row["range"])
    return f" ({low} to {high})"


def show_error(row: ComparedRow) -> str:
    """Return the error in percent, "exact" when both sides are equal."""
    if row["error"] is None:
        return MISSING
    if row["predicted"] == row["measured"]:
        return "exact"
    return f"{100 * row['error']:+.1f} %".replace("-", "−")


def grade(row: ComparedRow) -> str:
    if row["error"] is None:
        return ""
    size = abs(row["error"])
    return "close" if size <= CLOSE else "near" if size <= NEAR else "far"


def comparison_groups(compared: list[ComparedRow]) -> list[dict[str, Any]]:
    """Return the tables of the comparison. Rows that are nothing on both sides are left out."""
    groups = []
    for name, title in GROUPS.items():
        rows = [r for r in compared if r["group"] == name and (r["predicted"] or r["measured"])]
        if not rows:
            continue
        largest = max(max(r["predicted"] or 0, r["measured"] or 0) for r in rows)
        groups.append(
            {
                "title": title,
                "head": "figure" if name == "time" else "row",
                "rehearsed": any("rehearsed" in r for r in rows),
                "rows": [
                    {
                        "what": plain(r["what"]),
                        "total": r["what"].endswith("at the peak"),
                        "predicted": show_value(r["predicted"], r["unit"]) + show_range(r),
                        "rehearsed": show_value(r["rehearsed"], r["unit"]) if "rehearsed" in r else None,
                        "measured": show_value(r["measured"], r["unit"]),
                        "error": show_error(r),
                        "grade": grade(r),
                        "bars": _bars(r, largest) if name in MOMENTS.values() else None,
                    }
                    for r in rows
                ],
            }
        )
    return groups


def _bars(row: ComparedRow, largest: float) -> list[tuple[str, str]]:
    """Return (side, percent of the table's largest) of the sides that have a figure above zero."""
    return [(side, f"{100 * row[side] / largest:.1f}") for side in ("predicted", "measured") if row[side]]


def memory_bars(plan: dict[str, Any], summary: dict[str, Any]) -> list[dict[str, str]]:
    """Return bars of what a rank holds between steps and at the peak, in percent of what it may fill.

    Empty where the plan does not say how much that is.
    """
    room = number(plan.get("usable_bytes"))
    if not room:
        return []
    found = []
    for moment, name in MOMENTS.items():
        rows = predicted_rows(plan, moment)
        if moment != "peak":  # measured are tensors, without the process and what the allocator keeps
            rows = {row: held for row, held in rows.items() if row != "reserve"}
            name = f"tensors {name}"
        predicted = sum(rows.values())
        measured = largest_rank(summary, moment)
        for side, value in (("predicted", predicted), ("measured", measured)):
            if value:
                says = f"{show_bytes(value)} of {show_bytes(room)} ({value / room:.0%})"
                percent = f"{min(100.0, 100 * value / room):.1f}"
                found.append({"what": f"{name}, {side}", "side": side, "percent": percent, "says": says})
    return found


def largest_rank(summary: dict[str, Any], moment: str) -> float | None:
    """Return the fullest rank's measured bytes: the process's or card's own at the peak, its tensors between steps."""
    if moment == "peak":
        peaks = summary.get("peak_bytes_per_rank")
        return max((p for p in map(number, peaks) if p is not None), default=None) if isinstance(peaks, list) else None
    memory = summary.get("memory")
    ranks = memory.get(moment) if isinstance(memory, dict) else None
    if not isinstance(ranks, list):
        return None
    sums = [sum(n for v in rows.values() if (n := number(v)) is not None) for rows in ranks if isinstance(rows, dict)]
    return max(sums, default=None)


def sampling_of(story: Story) -> str:
    """Return how the samples were drawn, by the recipe."""
    temperature = number(_section(story, "train").get("sample_temperature"))
    return f"drawn at temperature {temperature:g}" if temperature else "taking the most probable token each time"


def comparison_note(compared: list[ComparedRow], bars: bool = True) -> str:
    """Return the lines under the tables: what the figures are, and why some are missing."""
    text = "Error is predicted over measured, less one. Bytes are those of the fullest rank"
    text += "; the pale bar is the plan's." if bars else "."
    if any(r.get("range") for r in compared):
        text += " Four of five runs lie in the plan's range."
    if any((r["predicted"] is None) != (r["measured"] is None) for r in compared):
        text += f" {MISSING} stands for a figure that nobody has: not predicted, or not measured."
    return text


def to_json(story: Story, page: Path | None) -> dict[str, Any]:
    """Return all that the page shows as plain data. The steps themselves are in events.jsonl."""
    return {
        "run": str(story.run.path),
        "report": None if page is None else str(page),
        "events": str(story.run.events),
        "name": story.recipe.get("name"),
        "state": story.state,
        "failure": story.failure,
        "parameters": story.parameters,
        "total_steps": story.total_steps,
        "strategy": strategy_of(story),
        "ranks": ranks_of(story),
        "headline": story.headline,
        "sources": source_rows(story.sources, story.steps),
        "compared": story.compared,
        "evaluations": story.evaluations,
        "samples": story.samples,
        "skips": story.skips,
        "checkpoints": [asdict(c) for c in story.checkpoints],
        "sessions": [asdict(s) for s in story.sessions],
        "damaged_lines": story.damaged_lines,
        "data": story.data,
        "recipe": story.recipe,
    }
