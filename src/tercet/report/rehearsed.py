"""The picture of a rehearsed step: memory by ledger row above, what each stream is busy with below, one axis of time."""

from __future__ import annotations

from html import escape
from typing import Any

from tercet.report.bench import LETTER, WIDTH
from tercet.report.chart import nice_ticks, tick_labels
from tercet.units import show_bytes, show_seconds

LEFT, RIGHT, TOP, MEMORY_HEIGHT, LANE_HEIGHT = 110, 24, 96, 260, 26
ROWS = ("weights", "master", "gradients", "optimizer", "states", "pinned", "buffers", "activations", "temporaries")
COLOURS = ("#2461c4", "#5b8def", "#0f766e", "#7c3aed", "#a78bfa", "#94a3b8", "#64748b", "#d97706", "#f2c063")
KINDS = {"compute": "#2461c4", "collectives": "#c2410c", "copies": "#0f766e"}
STYLE = """
svg { --ink: #1a2433; --soft: #5b6675; --line: #dfe4ea; --card: #ffffff; --end: #b91c1c; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8ecf2; --soft: #9aa5b4; --line: #333c49; --card: #161b22; --end: #f87171; }
}
text { fill: var(--ink); font: 13px system-ui, sans-serif; } .soft { fill: var(--soft); font-size: 12px; }
.back { fill: var(--card); } .grid { stroke: var(--line); } .end { stroke: var(--end); stroke-dasharray: 5 4; }
.title { font-size: 15px; font-weight: 600; }
"""


def picture(found: dict[str, Any]) -> str:
    """Return an SVG of `found["timeline"]` (a rehearsal.json's); "" when no step was finished. Light and dark."""
    drawn = found.get("timeline")
    if not drawn:
        return ""
    rows = _rows_of(drawn["memory"])
    streams = [s for s in drawn["streams"] if s["busy"]]
    capacity, peak = found["capacity_bytes"], found["peak_bytes"]
    most = max(peak, capacity if peak > capacity / 2 else 0, 1) / 2**30
    ticks = nice_ticks(0.0, most, 5)
    across = (WIDTH - LEFT - RIGHT) / drawn["seconds"]
    up = MEMORY_HEIGHT / ticks[-1] / 2**30
    floor = TOP + MEMORY_HEIGHT
    height = floor + 50 + LANE_HEIGHT * len(streams) + 36
    title = f"{found['strategy']}: one step of rank 0, {show_seconds(drawn['seconds'])}, {show_bytes(peak)} at the peak"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        *_legend(rows, 50),
    ]
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        y = floor - value * 2**30 * up
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label} GiB</text>')
    parts += _areas(drawn, rows, across, up, floor)
    if capacity / 2**30 <= ticks[-1]:
        y = floor - capacity * up
        parts.append(f'<line class="end" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">the card\'s end</text>')
    parts += _lanes(streams, across, floor + 50)
    parts += _times(drawn["seconds"], across, floor)
    return "\n".join([*parts, "</svg>", ""])


def _rows_of(samples: list[dict[str, Any]]) -> list[str]:
    seen = {row for sample in samples for row in sample["rows"]}
    return [row for row in ROWS if row in seen] + sorted(seen - set(ROWS))


def _colour(row: str) -> str:
    return COLOURS[ROWS.index(row)] if row in ROWS else "#475569"


def _legend(rows: list[str], y: int) -> list[str]:
    parts, x = [], 16
    for name, colour in [*((row, _colour(row)) for row in rows), *KINDS.items()]:
        needs = 40 + round(LETTER * len(name))
        if x + needs > WIDTH:
            x, y = 16, y + 20
        parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{colour}"/>')
        parts.append(f'<text class="soft" x="{x + 20}" y="{y}">{escape(name)}</text>')
        x += needs
    return parts


def _areas(drawn: dict[str, Any], rows: list[str], across: float, up: float, floor: int) -> list[str]:
    """Return one stacked area a row, stepwise: what is held stays held until the next sample."""
    samples = drawn["memory"]
    edges = [LEFT + min(s["seconds"], drawn["seconds"]) * across for s in samples]
    edges.append(LEFT + drawn["seconds"] * across)
    below, parts = [0.0] * len(samples), []
    for row in rows:
        above = [low + s["rows"].get(row, 0) * up for low, s in zip(below, samples, strict=True)]
        top = [f"{x:.1f},{floor - high:.1f}" for n, high in enumerate(above) for x in edges[n : n + 2]]
        bottom = [f"{x:.1f},{floor - low:.1f}" for n, low in enumerate(below) for x in edges[n : n + 2]]
        parts.append(f'<polygon fill="{_colour(row)}" points="{" ".join([*top, *bottom[::-1]])}"/>')
        below = above
    return parts


def _lanes(streams: list[dict[str, Any]], across: float, top: int) -> list[str]:
    parts = []
    for n, stream in enumerate(streams):
        y = top + n * LANE_HEIGHT
        parts.append(
            f'<text class="soft" x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(stream["name"][:14])}</text>'
        )
        parts += [
            f'<rect x="{LEFT + begin * across:.1f}" y="{y}" width="{max(0.5, (end - begin) * across):.1f}" '
            f'height="{LANE_HEIGHT - 8}" fill="{KINDS[kind]}"/>'
            for begin, end, kind in stream["busy"]
        ]
    return parts


def _times(seconds: float, across: float, floor: int) -> list[str]:
    unit, scale = ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    ticks = [t for t in nice_ticks(0.0, seconds * scale, 6) if t <= seconds * scale]
    return [
        f'<text class="soft" x="{LEFT + t / scale * across:.1f}" y="{floor + 20}" text-anchor="middle">{label} {unit}</text>'
        for t, label in zip(ticks, tick_labels(ticks), strict=True)
    ]
