"""Hold the planner to published measurements.

    python bench/plan_truth.py                 our rows, cross-validated by row and by source
    python bench/plan_truth.py ROWS.json       another file, predicted with the constants fitted on ours
    python bench/plan_truth.py --fit           fit the constants and write them to src/tercet/planner/constants.toml

Also: the share of truths within the ranges that `plan` prints, runs judged to fit as they did, and Kendall's tau of
pairs of methods. Two figures: in-domain (our own rows: each predicted by a fit on all others; another file's rows: by the shipped
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
from tercet.planner.calibrate import Prediction, Prepared, PublishedRun, publisher
from tercet.planner.constants import Constants, load, load_foreign
from tercet.planner.ranges import LIKELY, out_of_memory_chance
from tercet.spec.machine import GIB

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


def read(path: Path) -> list[tuple[dict[str, Any], PublishedRun]]:
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
    calibrate.write(CONSTANTS, values, calibrate.fit(foreign, prior=values), about, make_ranges(plain, values))


def make_ranges(plain: list[Prepared], values: Constants) -> dict[str, Any]:
    """Return the half-widths that hold 80 % of what was measured, of rows whose source no constant has seen."""
    by_source = errors(plain, calibrate.leave_out(plain, values, lambda row: publisher(row.source)))
    card = half(speeds(errors(plain, calibrate.leave_out(plain, values, card_of))))
    seen = errors(plain, {p.row.id: p.predict(values) for p in plain})
    return {
        **half_widths(by_source),
        # What a card that no row was measured on adds, as an error of its own beside the source's.
        "unseen_card": round(
            (1 + max(0.0, card**2 - half(speeds(seen)) ** 2) / half(speeds(by_source)) ** 2) ** 0.5, 2
        ),
        "cards": sorted({card_of(p.row) for p in plain}),
    }


def card_of(row: PublishedRun) -> str:
    return row.machine.card.name if row.machine and row.machine.card else ""


Errors = list[tuple[PublishedRun, float | None, float | None]]  # log(measured / predicted) of tokens/s and of memory


def errors(rows: list[Prepared], found: dict[str, Prediction]) -> Errors:
    def log(measured: float | None, predicted: float | None) -> float | None:
        return float(np.log(measured / predicted)) if measured and predicted else None

    predicted = [(p.row, found[p.row.id]) for p in rows]
    return [(r, log(r.tokens_per_s, f.tokens_per_s), log(r.memory_bytes, f.memory_bytes)) for r, f in predicted]


def speeds(found: Errors, several: bool | None = None) -> list[float]:
    return [s for row, s, _ in found if s is not None and several in (None, row.job.ranks > 1)]  # type: ignore[union-attr]


def half(values: list[float]) -> float:
    """Return the half-width that holds 80 % of so few values: the quantile with one more beyond it."""
    return float(np.quantile(np.abs(values), min(1.0, 0.8 * (1 + 1 / len(values)))))


def half_widths(found: Errors) -> dict[str, float]:
    return {
        "speed_one": round(half(speeds(found, several=False)), 3),
        "speed_several": round(half(speeds(found, several=True)), 3),
        "memory": round(half([m for _, _, m in found if m is not None]), 3),
    }


def coverage(plain: list[Prepared], values: Constants) -> dict[str, Any]:
    """Return the share of truths within the ranges, each source judged by half-widths of all the others."""
    every = errors(plain, calibrate.leave_out(plain, values, lambda row: publisher(row.source)))
    inside: dict[str, list[bool]] = {"tokens_per_s": [], "memory": []}
    for source in {publisher(row.source) for row, _, _ in every}:
        known = half_widths([e for e in every if publisher(e[0].source) != source])
        for row, speed, memory in (e for e in every if publisher(e[0].source) == source):
            several = row.job is not None and row.job.ranks > 1
            if speed is not None:
                inside["tokens_per_s"].append(abs(speed) <= known["speed_several" if several else "speed_one"])
            if memory is not None:
                inside["memory"].append(abs(memory) <= known["memory"])
    return {k: {"rows": len(v), "inside": float(np.mean(v))} for k, v in inside.items()}


def fits(rows: list[tuple[dict[str, Any], PublishedRun]], values: Constants) -> dict[str, Any]:
    """Return how many runs are judged as they went: what ran fits, what ran out of memory on the card does not.

    A row that does not say whether activations were recomputed is not judged, nor is one of foreign systems.
    """
    judged: dict[str, list[str]] = {"ran": [], "ran out": [], "wrong": []}
    for raw, row in rows:
        out_of = str(raw.get("oom") or "")
        if row.foreign or row.job is None or row.machine is None or out_of.startswith("host"):
            continue
        if raw.get("activation_checkpointing") is None:
            continue
        prepared = Prepared(row)
        need = calibrate.predicted_memory(prepared.counts, row.job, values, "total")
        chance = out_of_memory_chance(need, row.job, row.machine, values)
        judged["ran out" if out_of else "ran"].append(row.id)
        if chance is not None and (chance > LIKELY) != bool(out_of):
            judged["wrong"].append(f"{row.id} ({'ran out' if out_of else 'ran'}; chance of it {chance:.0%})")
    return judged


def kendall(pairs: list[tuple[float, float]]) -> float | None:
    """Return Kendall's tau of (predicted, measured): agreements in order less disagreements, over all pairs."""
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for n, a in enumerate(pairs) for b in pairs[:n]]
    return float(np.mean(signs)) if signs else None


def methods(raw: list[tuple[dict[str, Any], PublishedRun]], found: dict[int, Prediction]) -> float | None:
    """Return tau over pairs of methods: the same model on the same cards, run in two ways."""
    groups: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for n, (_, row) in enumerate(raw):
        if n in found and row.tokens_per_s and row.machine and row.model and found[n].tokens_per_s:
            key = (row.model.name, card_of(row), row.machine.ranks)
            groups.setdefault(key, []).append((found[n].tokens_per_s or 0.0, row.tokens_per_s))
    pairs = [(len(g) * (len(g) - 1) / 2, kendall(g)) for g in groups.values() if len(g) > 1]
    weight = sum(n for n, _ in pairs)
    return sum(n * (tau or 0.0) for n, tau in pairs) / weight if weight else None


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
    plain = calibrate.prepare(r for _, r in ours if not r.foreign)
    return {
        "file": str(path),
        "in_range": coverage(plain, load()),
        "fits": fits(rows, load()),
        "tau": {"in_domain": methods(rows, in_domain), "leave_one_source_out": methods(rows, by_source)},
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


def line(raw: dict[str, Any], row: PublishedRun, found: Prediction | None, other: Prediction | None) -> dict[str, Any]:
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
    given = raw.get("peak_mem_gb_per_gpu") or (row.memory_bytes / GIB if row.memory_bytes else None)  # else derived
    scale = row.memory_bytes / given if row.memory_bytes and given else 1e9
    memory = compared(
        found.memory_bytes / scale if found.memory_bytes else None,
        round(given, 2) if given else None,
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


def summarise(rows: list[tuple[PublishedRun, Prediction]]) -> dict[str, Any]:
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
    for name, s in report["in_range"].items():
        lines.append(f"within the range of 80 %: {name:13} {s['inside']:5.0%}  ({s['rows']} rows, by source left out)")
    judged = report["fits"]
    total = len(judged["ran"]) + len(judged["ran out"])
    lines.append(
        f"fits or not: {total - len(judged['wrong'])} of {total} judged as they went ({len(judged['ran'])} ran, "
        f"{len(judged['ran out'])} ran out of memory); wrong: {', '.join(judged['wrong']) or 'none'}"
    )
    tau = {k: f"{v:.2f}" if v is not None else "-" for k, v in report["tau"].items()}
    lines.append(
        f"Kendall's tau of pairs of methods: {tau['in_domain']} in domain, {tau['leave_one_source_out']} by source"
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
