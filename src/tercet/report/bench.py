"""The table and the picture of a bench, from its data."""

from __future__ import annotations

from html import escape
from typing import Any

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


def picture(report: dict[str, Any]) -> str:
    """Return an SVG with a bar for each run's tokens/s, its quartiles as a line, the prediction as a mark."""
    rows, width, step = report["rows"], 760, 34
    top = max([r["quartiles"][1] for r in rows] + [r["predicted_tokens_per_second"] or 0 for r in rows] + [1e-9])
    height, left = 50 + step * len(rows), 260

    def x(value: float) -> float:
        return left + (width - left - 90) * value / top

    title = f"{report['recipe']}: tokens/s" + (" (a rehearsal on CPU processes)" if report["rehearsal"] else "")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for n, row in enumerate(rows):
        y = 40 + n * step
        low, high = (x(q) for q in row["quartiles"])
        end = x(row["tokens_per_second"])
        label = f"{row['strategy']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
        parts += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="22" fill="#3b6ea5"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="#111" stroke-width="2"/>',
            f'<text x="{max(end, high) + 6:.1f}" y="{y + 16}">{show_count(row["tokens_per_second"])}</text>',
        ]
        if row["predicted_tokens_per_second"]:
            mark = x(row["predicted_tokens_per_second"])
            parts.append(
                f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + 25}" stroke="#c2410c" stroke-width="3"/>'
            )
    return "\n".join([*parts, "</svg>", ""])
