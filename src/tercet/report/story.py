"""What a run folder tells, read once: the facts that the page and the command show. No HTML, no torch.

Everything but recipe.yaml may be missing: a run may have just begun, been killed, or never been evaluated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tercet.errors import InputError
from tercet.report.compare import ComparedRow, compare, number
from tercet.spec.recipe import read_yaml
from tercet.spec.run_folder import RunFolder, read_json, read_state

WARM_UP = 0.1  # share of the first steps that no speed is taken from, as in summary.json


@dataclass(frozen=True)
class Start:
    """One start of a run: `first` is the step it began after, `seconds` from its first event to its last."""

    kind: str  # start or resume
    first: int
    began: float | None
    seconds: float
    ranks: int | None
    strategy: str | None
    versions: dict[str, str]


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint's folder. `fault` says what is wrong with it, by its manifest; contents are not read."""

    name: str
    step: int
    bytes: int | None
    ranks: int | None
    validation_loss: float | None
    fault: str | None
    best: bool = False


@dataclass
class Story:
    run: RunFolder
    recipe_text: str
    recipe: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]  # empty unless the run is finished
    data: dict[str, Any]  # data.json: what preparing the text found
    state: str  # finished, interrupted, failed, running, unfinished, not started
    failure: str | None
    parameters: int | None
    total_steps: int | None
    sources: list[str]  # paths of what the data is mixed of
    sessions: list[Start]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    skips: list[dict[str, Any]]
    cards: list[dict[str, Any]]  # looks at the cards' sensors, and cards that were lost
    saves: list[dict[str, Any]]
    expert_counts: list[list[int]]  # the newest, a list per layer with experts; empty for other models
    checkpoints: list[SavedStep]
    damaged_lines: list[int]
    headline: dict[str, Any] = field(default_factory=dict)
    compared: list[ComparedRow] = field(default_factory=list)


def read_story(run: RunFolder) -> Story:
    """Read a run folder. Raises InputError that names the file when one is damaged or must not be missing."""
    text, recipe = _read_recipe(run.recipe)
    everything, damaged = run.scan_events()
    if damaged and not everything:
        raise InputError(f"{run.events} holds no event that can be read: line {damaged[0]} is not one")
    sessions = _sessions(everything)
    events = _as_it_stands(everything)
    plan = run.read_plan() or {}
    state, failure = _state(run, everything)
    starts = [e for e in everything if e["event"] in ("start", "resume")]
    newest = starts[-1] if starts else {}
    described = plan["model"] if isinstance(plan.get("model"), dict) else {}
    story = Story(
        run=run,
        recipe_text=text,
        recipe=recipe,
        plan=plan,
        # A summary is of the run's end; one that lies beside a run that goes on belongs to an earlier end.
        summary=(run.read_summary() or {}) if state == "finished" else {},
        data=read_json(run.data) if run.data.exists() else {},
        state=state,
        failure=failure,
        parameters=_first(_whole(newest.get("parameters")), _whole(described.get("parameters"))),
        total_steps=_whole(newest.get("total_steps")),
        sources=[str(s) for s in newest["sources"]] if isinstance(newest.get("sources"), list) else [],
        sessions=sessions,
        steps=[e for e in events if e["event"] == "step" and _whole(e.get("step")) is not None],
        evaluations=[e for e in events if e["event"] == "evaluate" and number(e.get("validation_loss")) is not None],
        samples=[e for e in events if e["event"] == "sample"],
        skips=[e for e in events if e["event"] == "skip"],
        cards=[e for e in events if e["event"] in ("cards", "cards_lost")],
        saves=[e for e in events if e["event"] == "checkpoint"],
        expert_counts=_expert_counts([e for e in events if e["event"] == "experts"]),
        checkpoints=read_checkpoints(run.checkpoints),
        damaged_lines=damaged,
    )
    story.headline = _headline(story)
    rehearsal = read_json(run.rehearsal) if run.rehearsal.exists() else None
    story.compared = compare(plan, {**story.headline, **story.summary}, rehearsal)
    return story


def _read_recipe(path: Path) -> tuple[str, dict[str, Any]]:
    """Return recipe.yaml's text and values. Not validated: runs of other versions are shown too."""
    try:
        text = path.read_text(encoding="utf-8")
        read_yaml(text, str(path))  # bounded: a file of a few lines can mean more values than fit in memory
        tree = yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:  # not UTF-8; a date or a number that is none
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path} cannot be read: a recipe is a mapping of sections")
    return text, tree


def _as_it_stands(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that count: what lies after the step that a later session began from is done anew."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] in ("start", "resume"):
            first = _whole(event.get("step")) or 0
            kept = [e for e in kept if (_whole(e.get("step")) or 0) <= first]
        kept.append(event)
    return kept


def _sessions(events: list[dict[str, Any]]) -> list[Start]:
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] in ("start", "resume"):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    found = []
    for group in groups:
        first, times = group[0], [t for e in group if (t := number(e.get("time"))) is not None]
        versions = first.get("versions")
        found.append(
            Start(
                kind=first["event"],
                first=_whole(first.get("step")) or 0,
                began=number(first.get("time")),
                seconds=max(times) - min(times) if times else 0.0,
                ranks=_whole(first.get("ranks")),
                strategy=first.get("strategy"),
                versions=versions if isinstance(versions, dict) else {},
            )
        )
    return found


def _state(run: RunFolder, events: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Return (state, the first real error's message when it failed), from the newest session."""
    begins = [i for i, e in enumerate(events) if e["event"] in ("start", "resume")]
    kinds = [e["event"] for e in events[begins[-1] if begins else 0 :]]
    if "end" in kinds:
        return "finished", None
    if "interrupted" in kinds:
        return "interrupted", None
    if run.lock.exists():
        return "running", None
    reports = []
    for path in sorted(run.logs.glob("error-rank-*.json")):
        try:
            reports.append(read_json(path))
        except InputError:  # a disk that was full; the rest of the report stands without it
            continue
    # As the launcher does: not the broken collectives that the first error caused on other ranks.
    own = [r for r in reports if not r.get("echo") and not r.get("interrupted")] or reports
    if own:
        first = min(own, key=lambda r: number(r.get("time")) or 0.0)
        if first.get("shared"):
            return "failed", str(first.get("message", ""))
        return (
            "failed",
            f"rank {first.get('rank', '?')}, step {first.get('step', '?')}: {first.get('message', '')}",
        )
    return ("unfinished", None) if begins else ("not started", None)


def read_checkpoints(folder: Path) -> list[SavedStep]:
    """Return what lies in RUN/checkpoints, in order. Sizes are checked by the manifests, hashes are not."""
    if not folder.is_dir():
        return []
    found = [_saved(p) for p in sorted(folder.iterdir()) if re.fullmatch(r"step-\d+", p.name)]
    losses = [c.validation_loss for c in found if c.validation_loss is not None and c.fault is None]
    best = min(losses, default=None)
    return [SavedStep(**{**vars(c), "best": best is not None and c.validation_loss == best}) for c in found]


def _saved(folder: Path) -> SavedStep:
    step, fault, size, state = int(folder.name[5:]), None, None, {}
    try:
        files = read_json(folder / "manifest.json")["files"]
        size = sum(entry["bytes"] for entry in files.values())
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                fault = f"{name} is missing"
            elif path.stat().st_size != entry["bytes"]:
                fault = f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        state = read_state(folder)
    except (InputError, KeyError, TypeError, AttributeError) as error:
        fault = fault or f"cannot be read: {str(error).replace(str(folder) + '/', '')}"
    return SavedStep(
        name=folder.name,
        step=step,
        bytes=size,
        ranks=_whole(state.get("ranks")),
        validation_loss=number(state.get("validation_loss")),
        fault=fault,
    )


def _headline(story: Story) -> dict[str, Any]:
    """Return the figures at the top: summary.json's where it has them, else computed from the events."""
    steps, summary, evaluations = story.steps, story.summary, story.evaluations
    speed, step_seconds = speed_of(steps)
    last = evaluations[-1] if evaluations else {}
    validation = number(summary.get("validation_loss", last.get("validation_loss")))
    best = min(evaluations, key=lambda e: e["validation_loss"], default=None)
    whole_run = len(story.sessions) == 1 and number(summary.get("seconds"))
    peaks = summary.get("peak_bytes_per_rank")
    peaks = [p for p in map(number, peaks) if p is not None] if isinstance(peaks, list) else []
    done = max((_whole(e.get("step")) or 0 for e in (*steps, *story.skips)), default=0)
    return {
        "steps": _first(_whole(summary.get("steps")), done),
        "tokens": _first(number(summary.get("tokens")), sum(number(e.get("tokens")) or 0 for e in steps)),
        "train_loss": _first(number(summary.get("train_loss")), number(steps[-1].get("loss")) if steps else None),
        "validation_loss": validation,
        "validation_step": last.get("step"),
        "perplexity": perplexity(validation),
        "best_validation_loss": best["validation_loss"] if best else None,
        "best_validation_step": best.get("step") if best else None,
        "tokens_per_second": _first(number(summary.get("tokens_per_second")), speed),
        "step_seconds": _first(number(summary.get("step_seconds")), step_seconds),
        "seconds": whole_run or sum(s.seconds for s in story.sessions),
        "sessions": len(story.sessions),
        "peak_bytes": max(peaks, default=None),
    }


def speed_of(steps: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return (trained tokens per second, seconds per step) over the steps after the first tenth."""
    timed = [(s, number(e.get("tokens"))) for e in steps if (s := number(e.get("seconds"))) is not None]
    timed = timed[int(len(timed) * WARM_UP) :]
    seconds = sum(s for s, _ in timed)
    if not timed or seconds <= 0:
        return None, None
    tokens = [t for _, t in timed if t is not None]
    return (sum(tokens) / seconds if len(tokens) == len(timed) else None), seconds / len(timed)


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), or None where there is no loss or no such number."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def _whole(value: Any) -> int | None:
    n = number(value)
    return int(n) if n is not None and n == int(n) else None


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _expert_counts(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return the newest event's counts; an event that is not lists of whole numbers tells nothing."""
    counts = events[-1].get("counts") if events else None
    if not isinstance(counts, list) or not all(isinstance(layer, list) and layer for layer in counts):
        return []
    good = all(isinstance(n, int) and n >= 0 for layer in counts for n in layer)
    return counts if good else []
