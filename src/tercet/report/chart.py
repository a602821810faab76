"""Line charts as plain geometry: what page.html draws as inline SVG that stretches with the screen.

Lines live in a box of WIDTH x HEIGHT that is stretched to the figure; labels are text beside it, placed in
percent, so they keep their size on a phone. Long runs are thinned to the highest and lowest value of every
bucket of steps: no spike is lost and the page stays small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WIDTH, HEIGHT = 1000.0, 300.0
BUCKETS = 300  # a phone shows about as many columns, and a wide screen's curve looks the same
TICKS = 6
DOTS = 60  # more would only thicken the line
AIR = 0.04  # share of the values' range left free above and below
SMOOTH_FROM = 80  # steps; below that the raw line is plain enough
SMOOTH_SHARE = 40  # the window is a fortieth of the steps
ROBUST_FROM = 20  # values; of fewer nobody can say which is the odd one
ROBUST_SHARE = 0.01  # of the values at each end that may lie outside the axis
ROBUST_ROOM = 0.5  # how far the axis reaches beyond the others, in their own range

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """`style` is the CSS class: main, raw, second or limit. `path` joins the points, `dots` marks each."""

    name: str
    style: str
    points: Points
    path: str = ""
    dots: str = ""


@dataclass(frozen=True)
class Mark:
    percent: float
    text: str
    style: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: list[Line]
    x_ticks: list[tuple[str, float]]  # (label, percent from the left)
    y_ticks: list[tuple[str, float]]  # (label, percent from the top)
    x_range: tuple[float, float]
    marks: list[Mark] = field(default_factory=list)
    description: str = ""
    wide: bool = False
    outside: int = 0  # values beyond the axis, drawn at its edge

    @property
    def series(self) -> list[dict[str, Any]]:
        """Return what the pointer shows: per line its steps and values, to five significant digits."""
        return [
            {
                "name": line.name,
                "x": [x for x, _ in line.points],
                "y": [float(f"{y:.5g}") for _, y in line.points],
            }
            for line in self.lines
            if line.style != "limit"
        ]

    @property
    def mark_kinds(self) -> list[str]:
        return sorted({mark.style for mark in self.marks})


@dataclass(frozen=True)
class Series:
    """What a chart is asked to draw: points in order of the steps."""

    name: str
    style: str
    points: Points
    dots: bool = False


def chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    marks: Iterable[tuple[float, str, str]] = (),
    limits: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
    wide: bool = False,
) -> Chart | None:
    """Return the geometry of a chart, or None when no series has a point.

    `marks` are (step, text, style) and stand as vertical lines; `limits` are (value, name), drawn only when
    they lie within the values' own range. `from_zero` starts the value axis at 0.
    """
    series = [s for s in series if s.points]
    if not series:
        return None
    every = [p for s in series for p in s.points]
    x_low, x_high = _span((x for x, _ in every), 0.5)
    y_low, y_high = robust_span([y for _, y in every])
    if from_zero and y_low > 0:
        y_low = 0.0
    ticks = [t for t in nice_ticks(y_low, y_high, TICKS) if y_low <= t <= y_high]
    room = AIR * (y_high - y_low)
    y_low, y_high = (y_low if y_low == 0 else y_low - room), y_high + room

    drawn = [s for s in series if s.style != "main" or len(series) == 1]  # the median hides no value of its own
    outside = sum(not y_low <= y <= y_high for s in drawn for _, y in s.points)

    def across(x: float) -> float:
        return (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return min(1.0, max(0.0, (y_high - y) / (y_high - y_low)))

    lines = [_line(s, across, down) for s in series]
    for value, name in limits:
        if y_low <= value <= y_high:
            lines.append(Line(name, "limit", [(x_low, value)], f"M0 {down(value) * HEIGHT:.1f}H{WIDTH:.0f}"))
    x_ticks = [t for t in nice_ticks(x_low, x_high, TICKS) if x_low <= t <= x_high and t == int(t)]
    return Chart(
        title=title,
        unit=unit,
        lines=lines,
        x_ticks=list(zip(tick_labels(x_ticks), (100 * across(t) for t in x_ticks), strict=True)),
        y_ticks=list(zip(tick_labels(ticks), (100 * down(t) for t in ticks), strict=True)),
        x_range=(x_low, x_high),
        marks=[Mark(100 * across(x), text, style) for x, text, style in marks if x_low <= x <= x_high],
        description=_describe(title, unit, series),
        wide=wide,
        outside=outside,
    )


def _line(series: Series, across: Callable[[float], float], down: Callable[[float], float]) -> Line:
    """Return a series as SVG paths; `across` and `down` place a value within the box, 0 to 1."""
    points = thin(series.points)
    places = [f"{across(x) * WIDTH:.1f} {down(y) * HEIGHT:.1f}" for x, y in points]
    joined = "M" + "L".join(places) if len(places) > 1 else ""
    # A dot is a line of no length with a round end: it stays round however the box is stretched.
    dotted = (series.dots and len(places) <= DOTS) or not joined
    return Line(series.name, series.style, points, joined, "".join(f"M{place}h0" for place in places) if dotted else "")


def smoothed(points: Points) -> tuple[Points, int]:
    """Return (the median of a window around some BUCKETS of the steps, the window in steps).

    A median, so that one spike does not become a plateau; towards the ends the window shrinks, so that a
    steep beginning stays where it is. The points themselves, and 1, when they are few.
    """
    count = len(points)
    if count < SMOOTH_FROM:
        return points, 1
    half = max(2, count // (2 * SMOOTH_SHARE))
    values = [y for _, y in points]
    places = sorted({i * (count - 1) // (BUCKETS - 1) for i in range(BUCKETS)})
    result = []
    for i in places:
        reach = min(half, i, count - 1 - i)
        result.append((points[i][0], median(values[i - reach : i + reach + 1])))
    return result, 2 * half + 1


def thin(points: Points, buckets: int = BUCKETS) -> Points:
    """Return at most 2 * buckets + 2 points, in order: both ends, and each bucket's lowest and highest."""
    count = len(points)
    if count <= 2 * buckets:
        return points
    values = [y for _, y in points]
    kept = {0, count - 1}
    for b in range(buckets):
        begin = b * count // buckets
        bucket = values[begin : (b + 1) * count // buckets]
        kept |= {begin + bucket.index(min(bucket)), begin + bucket.index(max(bucket))}
    return [points[i] for i in sorted(kept)]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten, in or just around [low, high]."""
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return one label per tick, all in one unit, as short as still tells neighbours apart."""
    if len(ticks) < 2:
        return [f"{t:g}" for t in ticks]
    largest, step = max(abs(t) for t in ticks), ticks[1] - ticks[0]
    if largest < 0.01:
        return [f"{t:.2g}" if t == 0 else re.sub(r"e-0*", "e-", f"{t:.{_digits(t, step)}e}") for t in ticks]
    scale, suffix = next(
        (
            (s, n)
            for s, n in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))
            if largest >= 10 * s or largest >= s > 1e3
        ),
        (1.0, ""),
    )
    digits = max(0, -math.floor(math.log10(step / scale) + 1e-9))
    if digits > 4:
        return [f"{t:g}" for t in ticks]
    return ["0" if t == 0 else f"{t / scale:.{digits}f}{suffix}" for t in ticks]


def _digits(value: float, step: float) -> int:
    """Return the decimals of the mantissa that a multiple of `step` needs."""
    return max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))


def robust_span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range that an axis covers: of all values, unless a few lie so far off that they would flatten the rest."""
    low, high = _span(values, None)
    if len(values) < ROBUST_FROM:
        return low, high
    ordered = sorted(values)
    skip = max(1, int(ROBUST_SHARE * len(ordered)))
    inner_low, inner_high = ordered[skip], ordered[-1 - skip]
    room = ROBUST_ROOM * (inner_high - inner_low)
    if room == 0:
        return low, high
    return max(low, inner_low - room), min(high, inner_high + room)


def _span(values: Iterable[float], pad: float | None) -> tuple[float, float]:
    """Return (lowest, highest), apart even when there is a single value."""
    found = list(values)
    low, high = min(found), max(found)
    if low == high:
        around = pad if pad is not None else (abs(low) * 0.1 or 1.0)
        return low - around, high + around
    return low, high


def _describe(title: str, unit: str, series: Sequence[Series]) -> str:
    """Return the chart in words, for those who do not see it."""
    parts = []
    for s in series:
        if s.style == "raw" and len(series) > 1:
            continue
        (x0, y0), (x1, y1) = s.points[0], s.points[-1]
        span = f"{y0:.4g} at step {x0:.0f}"
        if x1 != x0:
            lowest = min(s.points, key=lambda p: p[1])
            span = f"from {span} to {y1:.4g} at step {x1:.0f}, lowest {lowest[1]:.4g} at step {lowest[0]:.0f}"
        parts.append(f"{s.name} {span}")
    return f"{title}{f' in {unit}' if unit else ''}: " + "; ".join(parts)
