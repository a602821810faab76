"""The table and the picture of a bench, from its data."""

from __future__ import annotations

from html import escape
from typing import Any

from tercet.report.chart import nice_ticks, tick_labels
from tercet.units import show_bytes, show_count

REHEARSAL = "A rehearsal: the ranks are processes that share this machine's CPU cores, so more of them are no faster."
HEAD = (
    "strategy",
    "ranks",
    "micro x accum",
    "tokens/s",
    "quartiles",
    "efficiency",
    "MFU",
    "peak per rank",
    "in collectives",
    "predicted tokens/s",
    "predicted memory",
)


def markdown(report: dict[str, Any]) -> str:
    """Return the bench as Markdown, one row a run."""
    lines = [f"# {report['recipe']}: {report['steps']} steps after {report['warm_up']} of warm-up", ""]
    if report["rehearsal"]:
        lines += [REHEARSAL, ""]
    if report["overrides"]:
        lines += [f"With: `{' '.join(report['overrides'])}`", ""]
    lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in report["rows"]]
    lines += [f"\nRefused: {r['strategy']} on {r['ranks']} ranks: {r['why']}" for r in report["refused"]]
    lines += [
        "",
        "Medians. Efficiency: speed over that of one rank times the ranks. In collectives: share of a step in which "
        "one was under way on rank 0, waiting included, hidden or not. A dash is a figure that is not known.",
    ]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    low, high = row["quartiles"]
    predicted, memory = row["predicted_tokens_per_second"], row["predicted_bytes"]
    return [
        row["strategy"],
        str(row["ranks"]),
        f"{row['micro_batch']} x {row['accumulation']}",
        show_count(row["tokens_per_second"]),
        f"{show_count(low)} to {show_count(high)}",
        share(row["efficiency"]),
        share(row["mfu"]),
        show_bytes(row["peak_bytes"]),
        share(row["communication_share"]),
        "-" if predicted is None else show_count(predicted),
        "-" if memory is None else show_bytes(memory),
    ]


WIDTH, RIGHT, STEP, TOP = 760, 130, 36, 76
LETTER = 7.3  # about the width of one, at 13 pixels
STYLE = """
svg { --ink: #1a2433; --soft: #5b6675; --line: #dfe4ea; --card: #ffffff; --bar: #2461c4; --mark: #c2410c; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8ecf2; --soft: #9aa5b4; --line: #333c49; --card: #161b22; --bar: #6ea0f5; --mark: #fb923c; }
}
text { fill: var(--ink); font: 13px system-ui, sans-serif; } .soft { fill: var(--soft); font-size: 12px; }
.back { fill: var(--card); } .grid { stroke: var(--line); } .bar { fill: var(--bar); }
.range { stroke: var(--ink); stroke-width: 2; } .mark { stroke: var(--mark); stroke-width: 3; }
.title { font-size: 15px; font-weight: 600; }
"""


def picture(report: dict[str, Any]) -> str:
    """Return an SVG: a bar for each run's tokens/s, its quartiles as a line, the prediction as a mark; light and dark."""
    rows = report["rows"]
    top = max([r["quartiles"][1] for r in rows] + [r["predicted_tokens_per_second"] or 0 for r in rows] + [1e-9])
    ticks = nice_ticks(0.0, top, 6)
    left = max(120, round(24 + LETTER * max((len(_label(row)) for row in rows), default=0)))
    scale = (WIDTH - left - RIGHT) / ticks[-1]
    bottom = TOP + STEP * len(rows)
    title = f"{report['recipe']}: trained tokens per second" + (" (CPU processes)" if report["rehearsal"] else "")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{bottom + 46}"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        *_legend(any(r["predicted_tokens_per_second"] for r in rows)),
    ]
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        x = left + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="soft" x="{left}" y="{bottom + 38}">tokens/s</text>')
    for n, row in enumerate(rows):
        parts += _bar(row, left, TOP + n * STEP, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend(predicted: bool) -> list[str]:
    items = [("bar", "measured (median)", '<rect class="bar" x="{x}" y="41" width="16" height="12"/>')]
    items.append(("range", "quartiles", '<line class="range" x1="{x}" x2="{r}" y1="47" y2="47"/>'))
    if predicted:
        items.append(("mark", "predicted", '<line class="mark" x1="{m}" x2="{m}" y1="39" y2="55"/>'))
    parts, x = [], 16
    for _, words, shape in items:
        parts.append(shape.format(x=x, r=x + 16, m=x + 8))
        parts.append(f'<text class="soft" x="{x + 22}" y="51">{words}</text>')
        x += 40 + round(LETTER * len(words))
    return parts


def _label(row: dict[str, Any]) -> str:
    return f"{row['strategy']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"


def _bar(row: dict[str, Any], left: int, y: int, scale: float) -> list[str]:
    low, high = (left + q * scale for q in row["quartiles"])
    end = left + row["tokens_per_second"] * scale
    predicted = row["predicted_tokens_per_second"]
    mark = left + predicted * scale if predicted else None
    # Behind the mark a bare figure would be read as the prediction's.
    figure = show_count(row["tokens_per_second"]) + (" measured" if mark and mark > end else "")
    parts = [
        f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(_label(row))}</text>',
        f'<rect class="bar" x="{left}" y="{y}" width="{end - left:.1f}" height="22" rx="2"/>',
        f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" y2="{y + 11}"/>',
        f'<text x="{max(end, high, mark or 0) + 8:.1f}" y="{y + 16}">{figure}</text>',
    ]
    if mark is not None:
        parts.append(f'<line class="mark" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + 25}"/>')
    return parts
