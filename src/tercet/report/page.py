"""write_report: a run folder as one page that needs nothing else. Layout in page.html, looks in page.css."""

from __future__ import annotations

import os
import time
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment
from markupsafe import Markup

from tercet import __version__
from tercet.report.chart import Chart, Series, chart, smoothed
from tercet.report.compare import number
from tercet.report.show import (
    comparison_groups,
    comparison_note,
    facts_of,
    lead_of,
    memory_bars,
    moment_of,
    notes_of,
    plain,
    sampling_of,
    show_loss,
    state_of,
    tiles_of,
)
from tercet.report.sources import losses_of, source_rows
from tercet.report.story import Story, read_story
from tercet.spec.run_folder import RunFolder
from tercet.units import show_bytes, show_count, show_seconds

TABLE_ROWS = 40  # of the curves as a table
SAMPLE_STEPS = 20  # per prompt
SKIP_ROWS = 50
SOURCE_CHARTS = 12


def write_report(run: RunFolder, target: Path | None = None) -> Path:
    """Write RUN/report.html, or `target`, in one go and return its path.

    Works at any moment of a run's life. Raises InputError that names the file when one is damaged or missing, and
    OSError when the page cannot be written.
    """
    page, target = render(read_story(run)), target or run.report
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    return target


def render(story: Story, refresh: int | None = None) -> str:
    """Return the page, a function of the story and of the clock in its last line. `refresh`: seconds, for tercet watch."""
    folder = resources.files("tercet") / "report"
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (folder / "page.html").read_text(encoding="utf-8")
    )
    charts = charts_of(story)
    return template.render(
        version=__version__,
        css=Markup((folder / "page.css").read_text(encoding="utf-8")),
        js=Markup((folder / "page.js").read_text(encoding="utf-8")),
        refresh=refresh,
        against=memory_bars(story.plan, story.summary),
        sampling=sampling_of(story),
        name=plain(story.recipe.get("name", "run")),
        state=state_of(story),
        lead=lead_of(story),
        notes=notes_of(story),
        tiles=tiles_of(story),
        facts=facts_of(story),
        charts=charts,
        series=_script_json([{"range": c.x_range, "lines": c.series} for c in charts]),
        step_rows=_step_rows(story),
        comparison=comparison_groups(story.compared),
        comparison_note=comparison_note(story.compared),
        samples=_samples(story),
        checkpoints=_checkpoints(story),
        sources=_sources(story),
        experts=_experts(story),
        skips=_skips(story),
        skip_count=len(story.skips),
        sessions=[
            {
                "began": moment_of(s.began),
                "first": s.first,
                "lasted": show_seconds(s.seconds),
                "ranks": plain(s.ranks if s.ranks is not None else "?"),
                "strategy": plain(s.strategy or "?"),
            }
            for s in story.sessions
        ],
        versions=_versions(story),
        recipe=plain(story.recipe_text),
        folder=plain(story.run.path.name),
        made=moment_of(time.time()),
    )


def _script_json(content: Any) -> Any:
    """Return JSON that may stand in a script element: no "<" that could end it."""
    return Markup(orjson.dumps(content).decode().replace("<", "\\u003c"))


# ----------------------------------------------------------------------------------------------------- curves


def points_of(rows: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of the rows that have both."""
    pairs = ((number(row.get("step")), number(row.get(key))) for row in rows)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def charts_of(story: Story) -> list[Chart]:
    steps, resumed, skipped = story.steps, *_marks(story)
    loss, validation = points_of(steps, "loss"), points_of(story.evaluations, "validation_loss")
    found = [_loss_chart("Loss", loss, validation, resumed + skipped, wide=True)]
    clip = (
        number((story.recipe.get("optim") or {}).get("clip")) if isinstance(story.recipe.get("optim"), dict) else None
    )
    norm, speed = points_of(steps, "grad_norm"), points_of(steps, "tokens_per_second")
    limits = [(clip, f"clipped above {clip:g}")] if clip is not None else []
    found += [
        chart("Gradient norm", "", _with_median("gradient norm", norm), resumed, limits, from_zero=True),
        chart("Learning rate", "", [Series("learning rate", "main", points_of(steps, "lr"))], from_zero=True),
        chart("Speed", "trained tokens per second", _with_median("tokens/s", speed), resumed, from_zero=True),
    ]
    load = _with_median("fullest expert", points_of(steps, "expert_load"))  # of models with experts only
    found.append(chart("Expert load", "fullest expert over the mean", load, resumed))
    for n, path in enumerate(story.sources[:SOURCE_CHARTS] if len(story.sources) > 1 else []):
        points = losses_of(steps, n)
        found.append(chart(f"Loss of {plain(path)}", "nats per token", _with_median("train", points), resumed))
    return [c for c in found if c is not None]


def _loss_chart(
    title: str,
    loss: list[tuple[float, float]],
    validation: list[tuple[float, float]],
    marks: list[tuple[float, str, str]],
    wide: bool = False,
) -> Chart | None:
    series = [*_with_median("train", loss), Series("validation", "second", validation, dots=True)]
    return chart(title, "nats per token", series, marks, wide=wide)


def _with_median(name: str, points: list[tuple[float, float]]) -> list[Series]:
    """Return the line as it is, pale, under its running median; a short line alone."""
    middle, window = smoothed(points)
    if window == 1:
        return [Series(name, "main", points)]
    return [Series(name, "raw", points), Series(f"median of {window}", "main", middle)]


def _marks(story: Story) -> tuple[list[tuple[float, str, str]], list[tuple[float, str, str]]]:
    """Return where sessions began and which steps were skipped, as (step, text, style)."""
    resumed = [(s.first + 0.5, f"resumed after step {s.first}", "resumed") for s in story.sessions if s.first > 0]
    skipped = [
        (x, f"step {x:.0f} was skipped", "skipped") for s in story.skips if (x := number(s.get("step"))) is not None
    ]
    return resumed, skipped[:SKIP_ROWS]


def _step_rows(story: Story) -> list[list[str]]:
    """Return evenly spread steps, every evaluated one among them when they are few."""
    validation = {e.get("step"): e["validation_loss"] for e in story.evaluations}
    chosen = story.steps
    if len(chosen) > TABLE_ROWS:
        spread = {chosen[i * (len(chosen) - 1) // (TABLE_ROWS - 1)]["step"] for i in range(TABLE_ROWS)}
        wanted = spread | (validation.keys() if len(validation) <= TABLE_ROWS else set())
        chosen = [e for e in chosen if e["step"] in wanted]
    formats = (("grad_norm", "{:.3f}"), ("lr", "{:.3g}"), ("tokens_per_second", "{:.0f}"))
    return [
        [plain(e["step"]), show_loss(number(e.get("loss"))), show_loss(validation.get(e["step"]), missing="")]
        + [form.format(value) if (value := number(e.get(key))) is not None else "–" for key, form in formats]
        for e in chosen
    ]


# --------------------------------------------------------------------------------------- samples and the rest


def _samples(story: Story) -> list[dict[str, Any]]:
    """Return per prompt the newest text and earlier ones, newest first; of very many, an even selection."""
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for event in story.samples:
        texts = by_prompt.setdefault(str(event.get("prompt", "")), [])
        texts.append({"step": plain(event.get("step", "?")), "text": plain(event.get("text", ""))})
    found = []
    for prompt, texts in by_prompt.items():
        newest, earlier = texts[-1], texts[-2::-1]
        if len(earlier) > SAMPLE_STEPS:
            earlier = [earlier[i * (len(earlier) - 1) // (SAMPLE_STEPS - 1)] for i in range(SAMPLE_STEPS)]
        found.append({"prompt": plain(prompt), "newest": newest, "earlier": earlier})
    return found


def _skips(story: Story) -> list[dict[str, str]]:
    return [{k: plain(s.get(k, "?")) for k in ("step", "loss", "grad_norm", "where")} for s in story.skips[:SKIP_ROWS]]


def _versions(story: Story) -> list[tuple[str, str]]:
    newest = story.sessions[-1].versions if story.sessions else {}
    return sorted((plain(what), plain(version)) for what, version in newest.items())


def _checkpoints(story: Story) -> list[dict[str, str]]:
    seconds = {e.get("step"): number(e.get("seconds")) for e in story.saves}
    rows = []
    for c in story.checkpoints:
        took = seconds.get(c.step)
        state, style = ("best", "good") if c.best else ("complete", "")
        rows.append(
            {
                "name": c.name,
                "size": show_bytes(c.bytes) if c.bytes is not None else "–",
                "ranks": show_count(c.ranks) if c.ranks is not None else "–",
                "loss": show_loss(c.validation_loss),
                "seconds": show_seconds(took) if took is not None else "–",
                "state": plain(c.fault) if c.fault else state,
                "style": "bad" if c.fault else style,
            }
        )
    return rows


def _sources(story: Story) -> list[dict[str, str]]:
    """Return a row per source of a mix: what was trained of it, and its loss at the beginning and at the end."""
    return [
        {
            "name": plain(row["name"]),
            "tokens": show_count(row["weight"]),
            "share": f"{100 * row['share']:.1f} %",
            "first": show_loss(row["first"]),
            "last": show_loss(row["last"]),
        }
        for row in source_rows(story.sources, story.steps)
    ]


def _experts(story: Story) -> list[dict[str, Any]]:
    """Return a row per layer with experts: each expert's load in percent of an even share, and the extremes."""
    rows = []
    for n, counts in enumerate(story.expert_counts, start=1):
        mean = sum(counts) / len(counts)
        loads = [100 * c / mean if mean else 0.0 for c in counts]
        rows.append(
            {
                "layer": n,
                "tokens": show_count(sum(counts)),
                "fullest": f"{max(loads):.0f} %",
                "emptiest": f"{min(loads):.0f} %",
                "idle": sum(c == 0 for c in counts),
                "loads": ", ".join(f"{load:.0f}" for load in loads),
            }
        )
    return rows
