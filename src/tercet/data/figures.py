"""The report of prepared data: figures that can be written as JSON, and how they read as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tercet.data import long
from tercet.data.corpus import PLACES, TRAIN, VALIDATION, Corpus, Findings
from tercet.data.mix import Mix
from tercet.data.shards import Rows, Writer
from tercet.data.sources import Source
from tercet.units import count_of, show_count


def report(
    checked: Corpus,
    writers: Sequence[Writer],
    sets: Sequence[Rows],
    validation: Writer | None,
    held_out: Rows | None,
    characters: dict[int, int],
    capacity: int,
    losses: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the figures. `losses`: per source, what the tokenizer could not write (`Losses.figures`).
    Lengths are those of training documents as they came, control tokens included."""
    lengths = np.concatenate(
        [np.frombuffer(w.full_lengths, np.int64) for w in writers if w.full_lengths] or [np.zeros(0)]
    )
    train, held = checked.findings["train"], checked.findings["validation"]
    sequences = sum(map(len, sets))
    tokens = sum(s.tokens for s in sets)
    return {
        "rows": _rows(checked, validation),
        "dropped": {"train": _dropped(train), "validation": _dropped(held)},
        "seen": _split(train.seen + held.seen, ""),
        "kinds": _split(train.seen + held.seen, "kind: "),
        "ignored_columns": _split(train.seen + held.seen, "column: "),
        "characters": {"train": characters[TRAIN], "validation": characters[VALIDATION]},
        "tokens": {"train": tokens, "validation": held_out.tokens if held_out else 0},
        "trained_tokens": {
            "train": sum(s.trained_tokens for s in sets),
            "validation": held_out.trained_tokens if held_out else 0,
        },
        "lengths": _lengths(lengths, capacity),
        "duplicates": checked.duplicates,
        "overlap": checked.overlap,
        "sequences": {"train": sequences, "validation": len(held_out) if held_out else 0},
        "documents": {
            "train": sum(s.documents for s in sets),
            "validation": held_out.documents if held_out else 0,
        },
        "padding_share": round(1 - tokens / (sequences * capacity), 6) if sequences else 0.0,
        "sequence_tokens": capacity,
        "files": [f.name for s in [*checked.train, *checked.validation] for f in s.files],
        "sources": [
            {
                "path": s.name,
                "files": len(s.files),
                "bytes": s.bytes,
                "tokens": r.tokens,
                "sequences": len(r),
                **losses[n],
            }
            for n, (s, r) in enumerate(zip(checked.train, sets, strict=True))
        ],
    }


def _rows(checked: Corpus, validation: Writer | None) -> dict[str, int]:
    """Rows read = rows trained + rows held out + rows dropped, always."""
    train, held = checked.findings["train"], checked.findings["validation"]
    held_out = 0
    if checked.fraction and validation is not None:
        held_out = sum(m.count(VALIDATION) for m in checked.marks) - checked.late[VALIDATION]
    return {
        "read": train.rows + held.rows,
        "train": train.kept - held_out,
        "validation": held.kept + held_out,
        "dropped": sum(train.dropped.values()) + sum(held.dropped.values()),
    }


def _dropped(findings: Findings) -> dict[str, Any]:
    return {r: {"rows": n, "places": findings.places[r]} for r, n in findings.dropped.most_common()}


def _split(seen: Counter[str], prefix: str) -> dict[str, int]:
    """Return the counts under a prefix, most frequent first; prefix "" takes those that have none."""
    if prefix:
        return {k.removeprefix(prefix): n for k, n in seen.most_common() if k.startswith(prefix)}
    return {k: n for k, n in seen.most_common() if ": " not in k}


def _lengths(lengths: np.ndarray, capacity: int) -> dict[str, Any]:
    if not lengths.size:
        return {}
    quantiles = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99], method="lower").astype(int).tolist()
    edges = [0]
    while edges[-1] < lengths.max():
        edges.append(max(16, edges[-1] * 2))
    counts, _ = np.histogram(lengths, bins=[e + 0.5 for e in edges])
    return {
        "min": int(lengths.min()),
        **dict(zip(("p10", "median", "p90", "p99"), quantiles, strict=True)),
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
        "longer_than_a_row": int((lengths > capacity).sum()),
        "histogram": [[int(e), int(c)] for e, c in zip(edges[1:], counts, strict=True)],
    }


def add_shares(figures: dict[str, Any], mix: Mix) -> None:
    """Put each source's share, and how often one epoch repeats it, into the figures."""
    for source, rows, share in zip(figures["sources"], mix.sources, mix.shares, strict=True):
        source["share"] = round(float(share), 6)
        source["repeats_per_epoch"] = round(float(share) * mix.rows_per_epoch / len(rows), 4) if len(rows) else 0.0


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    rows, lengths = figures["rows"], figures["lengths"]
    out = [
        f"rows        {rows['read']} read = {rows['train']} to train + {rows['validation']} held out"
        f" + {rows['dropped']} dropped",
        f"characters  {figures['characters']['train']} read to train, {figures['characters']['validation']} held out",
        _pair("tokens", figures["tokens"]),
        _pair("trained", figures["trained_tokens"]),
        *_chats(figures.get("chats")),
        f"lengths     {lengths.get('min', 0)} to {lengths.get('max', 0)} tokens,"
        f" median {lengths.get('median', 0)},"
        f" 90 % up to {lengths.get('p90', 0)}, 99 % up to {lengths.get('p99', 0)}",
        *_histogram(lengths.get("histogram", [])),
        *long.lines(figures.get("long_rows"), figures["sequence_tokens"]),
        f"sequences   {figures['sequences']['train']} of {figures['sequence_tokens']} tokens to train,"
        f" {figures['sequences']['validation']} held out, {100 * figures['padding_share']:.2f} % padding",
        f"duplicates  {figures['duplicates']} rows repeat an earlier one",
        f"overlap     {figures['overlap']} held-out rows also occur in training",
    ]
    for name, dropped in figures["dropped"].items():
        for reason, found in dropped.items():
            out.append(f"dropped     {found['rows']} of {name}: {reason}")
            out += [f"            {place}" for place in found["places"]]
            if found["rows"] > PLACES:
                out.append(f"            … and {found['rows'] - PLACES} more")
    for title, name in (("seen", "seen"), ("kinds", "kinds"), ("ignored", "ignored_columns")):
        if figures[name]:
            out.append(f"{title:<12}" + ", ".join(f"{k} {n}" for k, n in figures[name].items()))
    for source in figures["sources"]:
        out.append(
            f"source      {source['path']}: {count_of(source['files'], 'file')}, {show_count(source['tokens'])} tokens,"
            f" {count_of(source['sequences'], 'sequence')}, {100 * source['share']:.1f} % of what is trained,"
            f" each row {'once' if (times := source['repeats_per_epoch']) == 1 else f'{times:g} times'} per epoch"
        )
        out += [f"            {sentence}" for sentence in warnings(source)]
        out += _passed(source["passed_over"])
    return out


def warnings(source: dict[str, Any]) -> list[str]:
    """Return a sentence for each kind of text in a source that its tokenizer cannot write."""
    out = []
    if lost := source.get("lost_characters"):
        out.append(f"{lost} characters have no token and are lost ({', '.join(source['lost'])} …)")
    if unknown := source.get("unknown_tokens"):
        out.append(f"{unknown} tokens are the unknown token")
    return [f"warning: {source['path']}: {sentence}" for sentence in out]


def name_files(figures: dict[str, Any], sources: Sequence[Source], held: Sequence[Source]) -> None:
    """Put the names of these files and sources into figures that were made for others of the same content."""
    names = [f.name for s in [*sources, *held] for f in s.files]
    for old, new in zip(figures.get("files", names), names, strict=True):
        for side in figures["dropped"].values() if old != new else ():
            for found in side.values():
                found["places"] = [_renamed(p, old, new) for p in found["places"]]
    figures["files"] = names
    for figure, source in zip(figures["sources"], sources, strict=True):
        figure["path"] = source.name
        figure["passed_over"] = passed_over(source)


def _renamed(place: str, old: str, new: str) -> str:
    return new + place.removeprefix(old) if place.startswith(f"{old}, line ") else place


def passed_over(source: Source) -> dict[str, Any]:
    """Return, by reason, how many files beside those of a source are not read, and the first of them."""
    out: dict[str, Any] = {}
    for path, why in source.passed:
        found = out.setdefault(why, {"files": 0, "first": []})
        found["files"] += 1
        found["first"] = [*found["first"], path][:PLACES]
    return out


def _passed(reasons: dict[str, Any]) -> list[str]:
    return [
        f"            passed over, {why}: {', '.join(found['first'])}"
        + (f" … and {found['files'] - PLACES} more" if found["files"] > PLACES else "")
        for why, found in reasons.items()
    ]


def _pair(name: str, sides: dict[str, int]) -> str:
    return f"{name:<12}{sides['train']} to train, {sides['validation']} held out"


def _chats(figures: dict[str, Any] | None) -> list[str]:
    """Return what is to be said of the template and of what it did."""
    if figures is None:
        return []
    counts = {name: n for name, n in figures.items() if isinstance(n, int)}
    begins = "no begin token" if figures["begins_with"] is None else f"one {figures['begins_with']} in front"
    trained = {"assistant": "every answer", "last": "the last answer", "all": "every turn"}[figures["train_on"]]
    return [
        f"template    {figures['template']}; {trained} is trained, to its {figures['answers_end_with']}; {begins}",
        "chats       " + ", ".join(f"{n} {name}" for name, n in counts.items()),
    ]


def _histogram(bins: Sequence[Sequence[int]], width: int = 40) -> list[str]:
    most = max((count for _, count in bins), default=0)
    return [
        f"            up to {edge:>8}  {count:>8}  {'#' * -(-count * width // most)}" for edge, count in bins if count
    ]
