"""The answer as text: the verdict and what to do about it in the first lines, then tables that fit the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Any

from tercet.spec.kernels import VARLEN
from tercet.units import show_bytes, show_count, show_seconds

LEDGER = ("weights", "master", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
GIB = 2**30
# Columns of the table of strategies, and which of them go first when the terminal is narrow.
LEAVE_FIRST = ("disk", "waiting", "MFU", "micro x accum", "time", "80 % within", "risk")
WORTH_SAYING = 0.2  # chance of running out of memory that belongs beside the verdict


def show(answer: dict[str, Any], rows: int | None = None, width: int = 80, details: bool = False) -> str:
    """Return what `tercet plan` prints; no line but the command is wider than `width`."""
    parts = [verdict(answer, width), head(answer, width)]
    if answer.get("read"):
        # What stands four in is a command, to be copied whole.
        parts.append("\n".join(line if line.startswith("    ") else wrapped(line, width) for line in answer["read"]))
    strategies = answer["strategies"]
    shown = rows or (6 if details else 4)
    if strategies:
        parts.append(strategy_table(strategies[:shown], answer, width))
        parts.append(memory_bars(strategies[0], width))
        if details:
            parts += [memory_table(strategies[:shown], width), step_lines(strategies[0], answer, width)]
        if len(strategies) > shown:
            parts.append(f"{len(strategies) - shown} more fit: --details, --rows {len(strategies)}, or --json")
    parts += [what_if_table(table, width) for table in answer.get("what_if", ())]
    if answer["refused"]:
        limit = shown if details else 1 if strategies else 3
        lines = refused_lines(answer["refused"], limit, details)
        cut = wrapped if details else one_line
        parts.append("\n".join(["Refused:", *(cut(line, width, "  ") for line in lines)]))
    for title, key in (("Notes:", "notes"), ("Assumed:", "assumed")):
        if answer.get(key):
            parts.append("\n".join([title, *(wrapped(line, width, "  ") for line in answer[key])]))
    if answer.get("train"):
        parts.append(f"Run it:\n{answer['train']}")
    return "\n\n".join(part for part in parts if part)


def attention_words(found: dict[str, Any]) -> str:
    filled = f", filled up to {found['runs_at']}" if found["runs_at"] != found["head_size"] else ""
    flash = " (flash, packed documents in one call)" if found["kernel"] == VARLEN else ""
    return f"{found['kernel']}{flash}, heads of {found['head_size']}{filled}"


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Return text in lines of at most `width`; what goes on is indented once more. Words are never cut."""
    own = indent + text[: len(text) - len(text.lstrip())]
    whole = re.sub(r"(?<=\d) (?=\d{3}\b)", "\N{NO-BREAK SPACE}", text.strip())  # 44 286 is one figure
    filled = textwrap.fill(
        whole,
        width,
        initial_indent=own,
        subsequent_indent=own + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\N{NO-BREAK SPACE}", " ")


def to_terminal(text: str) -> str:
    """Return lines of figures, each wrapped to the terminal; bars are as long as they are drawn."""
    width = shutil.get_terminal_size((100, 24)).columns
    return "\n".join(line if "##" in line else wrapped(line, width) for line in text.split("\n"))


def one_line(text: str, width: int, indent: str = "") -> str:
    """Return text in one line; what does not fit is left out, and `…` says so (--details has it)."""
    own = indent + text[: len(text) - len(text.lstrip())]
    return own + textwrap.shorten(text.strip(), width - len(own), placeholder=" …")


# ------------------------------------------------------------------------------------------------------ verdict


def verdict(answer: dict[str, Any], width: int) -> str:
    """Return three lines: fits or not, figures, the command that does it or what would change the answer."""
    if "model" not in answer:
        return "No model named: only the file is read."
    what = f"{answer['model']['name']} on {place(answer)}"
    if missing := answer.get("not_built"):
        return "\n".join(wrapped(line, width) for line in (f"CANNOT RUN: {what}", *missing))
    if not answer["strategies"]:
        closest = (answer["refused"] or [{"name": "", "why": ["nothing is legal"]}])[0]
        reason = in_short({**closest, "way_out": None}).partition("; fits with ")[0]
        name = f"{closest['name']}: " if closest["name"] else ""
        lines = [f"DOES NOT FIT: {what}", f"{name}{reason}", *ways_out(answer)]
        return "\n".join(wrapped(line, width) for line in lines if line)
    best = answer["strategies"][0]
    chance = best["out_of_memory_chance"]
    barely = chance is not None and best["card_bytes"] > (best["usable_bytes"] or 0)
    needs = f" if the host has {gib(best['host_bytes'])} GiB of RAM" if not answer["machine"]["host_bytes"] else ""
    lines = [f"FITS{', BARELY' if barely else ''}{needs}: {what}", figures(best, answer)]
    return "\n".join([*(wrapped(line, width) for line in lines), answer.get("train") or ""]).rstrip()


def ways_out(answer: dict[str, Any]) -> list[str]:
    """Return a line per change that makes it fit; each was planned with before it is named."""
    ways = [way["says"] for way in answer["ways_out"]]
    if not ways:
        return ["No way out on such cards: take a smaller model"] if answer["refused"] else []
    lines = [f"Way out: {ways[0]}", *(f"or: {way}" for way in ways[1:])]
    return ["No way out within a year: take a smaller model", *lines] if answer["ways_out"][0].get("slow") else lines


def place(answer: dict[str, Any]) -> str:
    machine = answer["machine"]
    return f"{machine['ranks']}x {machine['card'] or 'CPU process'}"


def figures(best: dict[str, Any], answer: dict[str, Any]) -> str:
    """Return the numbers that decide: memory against what is there, speed, and the time of this run."""
    machine = answer["machine"]
    usable = f" of {gib(best['usable_bytes'])}" if best["usable_bytes"] else ""
    words = [f"{gib(best['card_bytes'])}{usable} GiB/{'card' if machine['card'] else 'rank'}"]
    if machine["host_bytes"]:
        words.append(f"{gib(best['host_bytes'])} of {gib(machine['host_bytes'])} GiB RAM")
    speed = best["tokens_per_second"]
    speeds = (best["ranges"] or {}).get("tokens_per_second")
    about = f" ({short(speeds[0])} to {short(speeds[1])})" if speeds else ""
    words.append(f"{thousands(speed)} tokens/s{about}" if speed else "speed unknown (tercet doctor)")
    if (best["out_of_memory_chance"] or 0) >= WORTH_SAYING:
        words.append(f"{best['out_of_memory_chance']:.0%} chance to run out of memory")
    if "total_seconds" in best:
        length = answer.get("run", {}).get("says") or best["for"].replace("a billion", "1 B")
        words.append(f"{length}: {show_seconds(best['total_seconds'])}")
    return ", ".join(words)


def head(answer: dict[str, Any], width: int) -> str:
    """Return what was planned: sizes, the batch, what the weights start from."""
    if "model" not in answer:
        return ""
    model, work, machine = answer["model"], answer["work"], answer["machine"]
    size = f"{show_count(model['parameters'])} parameters"
    if model["active_parameters"] != model["parameters"]:
        size += f", {show_count(model['active_parameters'])} active"
    if model["trained_parameters"] < model["parameters"]:
        size += f", {show_count(model['trained_parameters'])} of adapters are trained"
    usable = f"; {gib(machine['usable_bytes'])} GiB usable on each card" if machine["card"] else ""
    lines = [
        f"{size}; weights: {answer['weights']}",
        f"{work['batch_sequences']} sequences of {work['sequence_tokens']} tokens per step "
        f"({work['tokens_per_step']} tokens), {work['precision']}, {work['optimizer']}{usable}",
    ]
    if kernels := answer.get("attention"):
        lines.append(f"attention: {'; '.join(map(attention_words, kernels))}")
    if longest := answer["longest"]:
        lines.append(f"sequences of up to {longest['tokens']} tokens fit ({longest['strategy']}, one at a time)")
    return "\n".join(wrapped(line, width) for line in lines)


# ------------------------------------------------------------------------------------------------------- tables


def strategy_table(strategies: list[dict[str, Any]], answer: dict[str, Any], width: int) -> str:
    """Return a line per strategy, best first; columns that do not fit the width are left out."""
    rank = "card" if answer["machine"]["kind"] != "cpu" else "rank"
    columns: dict[str, list[str]] = {
        "strategy": [s["name"] for s in strategies],
        "micro x accum": [f"{s['micro_batch']} x {s['accumulation']}" for s in strategies],
        rank: [gib(s["card_bytes"]) for s in strategies],
        "host": [gib(s["host_bytes"]) for s in strategies],
        "disk": [show_bytes(s["disk_bytes"]) for s in strategies],
        "tokens/s": [thousands(s["tokens_per_second"]) for s in strategies],
        "80 % within": [span(s) for s in strategies],
        "risk": [share(s["out_of_memory_chance"]) for s in strategies],
        "MFU": [share(s["mfu"]) for s in strategies],
        "waiting": [share(s["communication_share"]) for s in strategies],
        "time": [show_seconds(s["total_seconds"]) if "total_seconds" in s else "-" for s in strategies],
    }
    waiting = list(LEAVE_FIRST)
    while table_width(columns) > width and waiting:
        del columns[waiting.pop(0)]
    what = f"; time: {strategies[0]['for']}" if "time" in columns and "for" in strategies[0] else ""
    order = "fastest first; within the plan's error, least host memory"
    return "\n".join([wrapped(f"What fits, {order} (GiB per {rank} and of the host{what}):", width), grid(columns)])


def span(strategy: dict[str, Any]) -> str:
    speeds = (strategy["ranges"] or {}).get("tokens_per_second")
    return f"{short(speeds[0])}-{short(speeds[1])}" if speeds else "-"


def memory_table(strategies: list[dict[str, Any]], width: int) -> str:
    """Return the ledger at the peak: a row each, a column per strategy, as many as the width holds."""
    rows = [row for row in LEDGER if any(s["ledger"][row] for s in strategies)]
    columns: dict[str, list[str]] = {"GiB at the peak": [*rows, "all"]}
    names = []
    for number, strategy in enumerate(strategies, 1):
        values = [gib(strategy["ledger"][row]) for row in rows] + [gib(sum(strategy["ledger"].values()))]
        more = {**columns, f"({number})": values}
        if table_width(more) > width:
            break
        columns = more
        names.append(f"({number}) {strategy['name']}")
    return grid(columns) + "\n" + "\n".join(names)


def memory_bars(strategy: dict[str, Any], width: int) -> str:
    """Return the peak of a step, a bar per row against what a card has, and their sum."""
    there = strategy["usable_bytes"]
    rows = {row: size for row in LEDGER if (size := strategy["ledger"][row])}
    if not there or not rows:
        return ""
    figures = [*rows.items(), ("all", sum(rows.values()))]
    names, sizes = [name for name, _ in figures], [gib(size) for _, size in figures]
    left, number = max(map(len, names)), max(map(len, sizes))
    room = max(10, min(width, 100) - left - number - 6)
    lines = [
        f"A step of {strategy['name']} at its peak, of {gib(there)} GiB per {'card' if strategy['ranges'] else 'rank'}:"
    ]
    begin = 0.0
    for (name, size), text in zip(figures, sizes, strict=True):
        first = 0 if name == "all" else round(begin / there * room)
        last = round(((0 if name == "all" else begin) + size) / there * room)
        bar = (" " * first + "#" * max(last - first, 1))[:room]
        lines.append(f"{name.ljust(left)}  {text.rjust(number)} |{bar.ljust(room)}|")
        begin += size
    return "\n".join(lines)


def what_if_table(table: dict[str, Any], width: int) -> str:
    """Return the best plan for each value of one thing; `*` is what was asked for."""
    title = f"If {table['of']} were:"
    if not table["rows"]:
        return wrapped(f"{title} {table['why']}", width)
    rows = table["rows"]
    columns: dict[str, list[str]] = {
        table["of"]: [("* " if row["here"] else "  ") + row["says"] for row in rows],
        "strategy": [row["strategy"] or "does not fit" for row in rows],
        "card": [gib(row["card_bytes"]) if row["strategy"] else "-" for row in rows],
        "host": [gib(row["host_bytes"]) if row["strategy"] else "-" for row in rows],
        "tokens/s": [thousands(row["tokens_per_second"]) if row["strategy"] else "-" for row in rows],
        "80 % within": [span({"ranges": {"tokens_per_second": row["range"]}}) if row["range"] else "-" for row in rows],
    }
    if table_width(columns) > width:
        del columns["80 % within"]
    return "\n".join([wrapped(f"{title} (GiB; * as asked)", width), grid(columns)])


def table_width(columns: dict[str, list[str]]) -> int:
    return sum(max(map(len, [title, *cells])) for title, cells in columns.items()) + 2 * (len(columns) - 1)


def grid(columns: dict[str, list[str]]) -> str:
    """Return columns, the first and names of strategies flush left, figures flush right."""
    padded = []
    for n, (title, cells) in enumerate(columns.items()):
        room = max(map(len, [title, *cells]))
        left = n == 0 or title == "strategy"
        padded.append([c.ljust(room) if left else c.rjust(room) for c in [title, *cells]])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def gib(value: float) -> str:
    number = value / GIB
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 0.1 or number == 0 else f"{number:.3f}"


def thousands(value: float | None) -> str:
    return f"{value:,.0f}".replace(",", " ") if value else "unknown"


def short(value: float) -> str:
    """Return a figure as its range shows it: two figures, for it has no more."""
    return thousands(float(f"{value:.2g}"))


def share(value: float | None) -> str:
    return f"{value:.0%}" if value is not None else "-"


# ------------------------------------------------------------------------------------------------------ details


def step_lines(best: dict[str, Any], answer: dict[str, Any], width: int) -> str:
    """Return where a step's time goes, what it costs, and how far predictions have been from measurements."""
    lines = []
    if best["clock"]:
        parts = sorted(((v, k) for k, v in best["clock"].items() if v > 0.005 * best["step_seconds"]), reverse=True)
        lines.append(
            f"A step of {best['name']}: {best['step_seconds']:.2f} s = "
            + ", ".join(f"{k} {v / best['step_seconds']:.0%}" for v, k in parts)
        )
    if money := costs(best):
        lines.append(f"{best['for']}: {', '.join(money)}")
    bars = answer["error_bars"]
    if bars.get("tokens_per_second_90_percent") and best["tokens_per_second"] and answer["machine"]["card"]:
        lines.append(
            f"Nine of ten predictions were within {bars['tokens_per_second_90_percent']:.0%} (speed) and "
            f"{bars['memory_90_percent']:.0%} (memory) of {bars['runs']} published runs, cross-validated. Ranges hold "
            "four of five runs of projects that no constant was fitted to, as this engine on cards still is; risk: of "
            "running out of the card's memory"
        )
    return "\n".join(wrapped(line, width) for line in lines)


def costs(best: dict[str, Any]) -> list[str]:
    found = []
    if "kwh" in best:
        found.append(f"{best['kwh']:.3g} kWh (cards at their power limit, 150 W of host, a supply of 90 %)")
    if "energy_money" in best:
        found.append(f"{best['energy_money']:.2f} for the energy")
    if "money" in best:
        found.append(f"{best['money']:.2f} at the given price")
    elif "rent_usd" in best:
        found.append(f"${best['rent_usd'][0]:.2f} to ${best['rent_usd'][1]:.2f} rented")
    return found


def refused_lines(refused: list[dict[str, Any]], rows: int, details: bool) -> list[str]:
    found = []
    for entry in refused[:rows]:
        for why in entry["why"] if details else [in_short(entry)]:
            found.append(f"{entry['name']}: {why}" if entry["name"] else why)
        found += [f"  {line}" for line in need_lines(entry)]
    if len(refused) > rows:
        found.append(f"and {len(refused) - rows} more (--details, --json)")
    return found


def in_short(entry: dict[str, Any]) -> str:
    """Return a refusal as one line holds it: what is short and by how much, and the change with which it fits."""
    short = entry.get("short") or {}
    words = {"card_bytes": "card memory", "host_bytes": "host RAM", "disk_bytes": "disk"}
    missing = [f"{show_bytes(size)} of {words[what]} short" for what, size in short.items() if size]
    if not missing:
        return entry["why"][0]
    way = entry.get("way_out")
    return ", ".join(missing) + (f"; fits with {way['says']}" if way else "")


def need_lines(entry: dict[str, Any]) -> list[str]:
    """Return what a strategy that is not built would take."""
    words = (("would_need", "it would take"), ("would_need_recomputing", "with recompute full"))
    return [need_line(text, entry[key]) for key, text in words if key in entry]


def need_line(words: str, need: dict[str, Any]) -> str:
    host = need["host"]
    line = (
        f"{words} {show_bytes(need['card_bytes'])} per card and {show_bytes(sum(host.values()))} of host RAM "
        f"(states {show_bytes(host['states'])}, pinned {show_bytes(host['pinned'])})"
    )
    speed = need.get("tokens_per_second")
    return f"{line}, at {speed:.0f} tokens/s" if speed else line
