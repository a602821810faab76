"""The picture of `tercet plan --what-if`: tokens/s of the best plan for each value, with its range; what does not fit."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LEFT, BAR, GAP = 720, 130, 22, 12
RIGHT = 190  # room for a figure and a strategy's name
TITLES = {
    "host_ram": "host memory",
    "cards": "cards",
    "links": "PCIe lanes of each card",
    "sequence": "tokens per sequence (as many tokens per step)",
}


def picture(answer: dict[str, Any]) -> str:
    """Return an SVG of `answer["what_if"]`: one group of bars per thing that was changed."""
    tables = [table for table in answer["what_if"] if table["rows"]]
    top, parts = 54, []
    fastest = max([_top(row) for table in tables for row in table["rows"]] + [1e-9])
    for table in tables:
        parts.append(f'<text class="name" x="16" y="{top}">{escape(TITLES[table["of"]])}</text>')
        top += 12
        for row in table["rows"]:
            parts += _bar(row, top, (WIDTH - LEFT - RIGHT) / fastest)
            top += BAR + GAP
        top += 24
    return "\n".join([*_opening(answer, top), *parts, "</svg>", ""])


def _top(row: dict[str, Any]) -> float:
    return row["range"][1] if row["range"] else row["tokens_per_second"] or 0.0


def _opening(answer: dict[str, Any], height: int) -> list[str]:
    machine = answer["machine"]
    title = f"{answer['model']['name']} on {machine['ranks']}x {machine['card'] or 'CPU process'}: tokens/s of the best plan"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        "<style>text{font:13px system-ui,sans-serif;fill:#1e293b}.soft{fill:#64748b}.name,.title{font-weight:600}"
        ".bar{fill:#2563eb}.here{fill:#0f766e}.range{stroke:#0f172a;stroke-width:1.5}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
    ]


def _bar(row: dict[str, Any], top: int, scale: float) -> list[str]:
    middle = top + BAR * 0.7
    label = escape(row["says"] + (" (here)" if row["here"] else ""))
    parts = [f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{label}</text>']
    speed = row["tokens_per_second"]
    if row["strategy"] is None:
        return [*parts, f'<text class="soft" x="{LEFT}" y="{middle:.0f}">does not fit</text>']
    if not speed:
        return [
            *parts,
            f'<text class="soft" x="{LEFT}" y="{middle:.0f}">{escape(row["strategy"])}, speed unknown</text>',
        ]
    kind = "here" if row["here"] else "bar"
    parts.append(f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{speed * scale:.1f}" height="{BAR}"/>')
    end = speed
    if row["range"]:
        low, end = row["range"]
        y = top + BAR / 2
        parts.append(
            f'<line class="range" x1="{LEFT + low * scale:.1f}" x2="{LEFT + end * scale:.1f}" y1="{y}" y2="{y}"/>'
        )
    figure = f"{speed:,.0f}".replace(",", " ")
    parts.append(
        f'<text class="soft" x="{LEFT + end * scale + 8:.1f}" y="{middle:.0f}">{figure}  {escape(row["strategy"])}</text>'
    )
    return parts
