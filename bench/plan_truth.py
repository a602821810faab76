"""Hold the planner to published measurements.

    python bench/plan_truth.py                 our rows, cross-validated by row and by source
    python bench/plan_truth.py ROWS.json       another file, predicted with the constants fitted on ours
    python bench/plan_truth.py --fit           fit the constants and write them to src/tercet/planner/constants.toml

Two figures: in-domain (our own rows: each predicted by a fit on all others; another file's rows: by the shipped
fit) and leave-one-source-out (fitted without the repository that measured the row). PyTorch systems and foreign
ones (hand-written kernels, other people's pipelines) stand apart and have constants of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from published import read_row
from tercet.planner import calibrate
from tercet.planner.calibrate import Prediction, Prepared, Row, publisher
from tercet.planner.constants import Constants, load, load_foreign

OURS = Path(__file__).with_name("measurements.json")
CONSTANTS = Path(__file__).parents[1] / "src/tercet/planner/constants.toml"
GROUPS = (("pytorch", False), ("foreign", True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="?", type=Path, default=OURS, help="a file in the format of bench/measurements.json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fit", action="store_true", help="fit on our rows and write the constants")
    options = parser.parse_args()
    if options.fit:
        fit_and_write()
    report = make_report(options.rows)
    print(json.dumps(report, indent=1) if options.json else as_text(report))


def read(path: Path) -> list[tuple[dict[str, Any], Row]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    raw = content["rows"] if isinstance(content, dict) else content
    return [(r, read_row(r)) for r in raw]


def fit_and_write() -> None:
    rows = [row for _, row in read(OURS)]
    plain = calibrate.prepare(r for r in rows if not r.foreign)
    foreign = calibrate.prepare(r for r in rows if r.foreign)
    values = calibrate.fit(plain)
    held_out = calibrate.leave_one_out(plain, values)
    figures = summarise([(p.row, held_out[p.row.id]) for p in plain])
    about = {
        "rows": len(plain),
        "sources": len({publisher(p.row.source) for p in plain}),
        "tokens_median": round(figures["tokens_per_s"]["median"], 3),
        "tokens_p90": round(figures["tokens_per_s"]["p90"], 3),
        "memory_median": round(figures["memory"]["median"], 3),
        "memory_p90": round(figures["memory"]["p90"], 3),
    }
    calibrate.write(CONSTANTS, values, calibrate.fit(foreign, prior=values), about)


def make_report(path: Path) -> dict[str, Any]:
    rows = read(path)
    own = path.resolve() == OURS.resolve()
    ours = rows if own else read(OURS)
    in_domain: dict[int, Prediction] = {}
    by_source: dict[int, Prediction] = {}
    for _, foreign in GROUPS:
        known = calibrate.prepare(r for _, r in ours if r.foreign == foreign)
        whole, prior = (load_foreign(), load()) if foreign else (load(), Constants())
        wanted = {n: Prepared(r) for n, (_, r) in enumerate(rows) if r.foreign == foreign and r.why is None}
        if own:
            held_out = calibrate.leave_one_out(known, whole, prior)
            in_domain.update({n: held_out[p.row.id] for n, p in wanted.items()})
        else:
            in_domain.update({n: p.predict(whole) for n, p in wanted.items()})
        for source in sorted({publisher(p.row.source) for p in wanted.values()}):
            others = [p for p in known if publisher(p.row.source) != source]
            constants = whole if len(others) == len(known) else calibrate.fit(others, whole, prior, rounds=5)
            by_source.update({n: p.predict(constants) for n, p in wanted.items() if publisher(p.row.source) == source})
    return {
        "file": str(path),
        "rows": [line(raw, row, in_domain.get(n), by_source.get(n)) for n, (raw, row) in enumerate(rows)],
        "summary": {
            name: {
                figure: summarise(
                    [(row, found[n]) for n, (_, row) in enumerate(rows) if row.foreign == foreign and n in found]
                )
                for figure, found in (("in_domain", in_domain), ("leave_one_source_out", by_source))
            }
            for name, foreign in GROUPS
        },
    }


def line(raw: dict[str, Any], row: Row, found: Prediction | None, other: Prediction | None) -> dict[str, Any]:
    """Return one row of the report; memory in the unit in which it was published."""
    result: dict[str, Any] = {
        "id": row.id,
        "model": raw.get("model", {}).get("name"),
        "source": publisher(row.source),
        "group": "foreign" if row.foreign else "pytorch",
    }
    if row.why is not None or found is None or other is None:
        return {**result, "why": row.why or "it names no figure"}
    if row.assumed:
        result["assumed"] = list(row.assumed)
    result["tokens_per_s"] = compared(found.tokens_per_s, row.tokens_per_s, other.tokens_per_s)
    scale = (row.memory_bytes / raw["peak_mem_gb_per_gpu"]) if row.memory_bytes else 1e9
    memory = compared(
        found.memory_bytes / scale if found.memory_bytes else None,
        raw.get("peak_mem_gb_per_gpu"),
        other.memory_bytes / scale if other.memory_bytes else None,
    )
    result["memory"] = {**memory, "kind": row.memory_kind, "unit": raw.get("peak_mem_unit") or "GB"}
    return result


def compared(predicted: float | None, measured: float | None, other: float | None) -> dict[str, Any]:
    def error(value: float | None) -> float | None:
        return round(value / measured - 1, 4) if value and measured else None

    return {
        "predicted": round(predicted, 2) if predicted else None,
        "measured": measured,
        "error": error(predicted),
        "error_leave_source_out": error(other),
    }


def summarise(rows: list[tuple[Row, Prediction]]) -> dict[str, Any]:
    """Return median and 90th percentile of the absolute relative error, for tokens/s and for memory."""
    speed = [abs(p.tokens_per_s / r.tokens_per_s - 1) for r, p in rows if r.tokens_per_s and p.tokens_per_s]
    memory = [abs(p.memory_bytes / r.memory_bytes - 1) for r, p in rows if r.memory_bytes and p.memory_bytes]
    return {"tokens_per_s": spread(speed), "memory": spread(memory)}


def spread(errors: list[float]) -> dict[str, Any]:
    if not errors:
        return {"rows": 0, "median": None, "p90": None}
    return {"rows": len(errors), "median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{'row':6} {'model':22} {'source':30} {'tokens/s':>9} {'measured':>9} {'error':>6} {'other':>6} "
        f"{'memory':>7} {'measured':>8} {'error':>6} {'other':>6}"
    ]
    for row in report["rows"]:
        start = f"{row['id']:6} {str(row['model'])[:22]:22} {row['source'].removeprefix('github.com/')[:30]:30}"
        if "why" in row:
            lines.append(f"{start} not predicted: {row['why']}")
            continue
        speed, memory = row["tokens_per_s"], row["memory"]
        text = f"{start} {number(speed['predicted'], 0)} {number(speed['measured'], 0)} {percent(speed)}"
        if memory["measured"]:
            text += f" {number(memory['predicted'], 2, 7)} {number(memory['measured'], 2, 8)} {percent(memory)}"
            text += f" {memory['kind']}"
        lines.append(text + (f"  assumed: {', '.join(row['assumed'])}" if "assumed" in row else ""))
    for group, figures in report["summary"].items():
        for figure, what in figures.items():
            for name, s in what.items():
                if s["rows"]:
                    lines.append(
                        f"{group:8} {figure:21} {name:13} median {s['median']:6.1%}  "
                        f"90 % within {s['p90']:6.1%}  ({s['rows']} rows)"
                    )
    return "\n".join(lines)


def number(value: float | None, digits: int, width: int = 9) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"


def percent(figure: dict[str, Any]) -> str:
    return " ".join(
        f"{figure[k]:+6.0%}" if figure[k] is not None else "     -" for k in ("error", "error_leave_source_out")
    )


if __name__ == "__main__":
    main()
