"""The answer as text: a ranked table, what was refused and why, what was assumed."""

from __future__ import annotations

from typing import Any

from tercet.units import show_bytes, show_count, show_seconds

LEDGER = (
    ("weights", "weights"),
    ("master", "master"),
    ("gradients", "grads"),
    ("optimizer", "optim"),
    ("activations", "activ"),
    ("logits", "logits"),
    ("buffers", "buffers"),
    ("reserve", "reserve"),
)


def show(answer: dict[str, Any], rows: int = 6) -> str:
    """Return what `tercet plan` prints."""
    parts = [head(answer)]
    if answer.get("read"):
        parts.append("\n".join(answer["read"]))
    strategies = answer["strategies"]
    if strategies:
        parts.append(speed_table(strategies[:rows], answer))
        parts.append(memory_table(strategies[:rows], answer))
        parts += [text] if (text := details(strategies[0], answer)) else []
        if len(strategies) > rows:
            parts.append(f"{len(strategies) - rows} more fit: --rows {len(strategies)}, or --json")
    elif "model" in answer:
        parts.append("Nothing fits as asked.")
    if answer["refused"]:
        parts.append("\n".join(["Refused:", *(f"  {line}" for line in refused_lines(answer["refused"], rows))]))
    if answer["notes"]:
        parts.append("\n".join(["Notes:", *(f"  {n}" for n in answer["notes"])]))
    if answer.get("assumed"):
        parts.append("\n".join(["Assumed:", *(f"  {a}" for a in answer["assumed"])]))
    return "\n\n".join(parts)


def head(answer: dict[str, Any]) -> str:
    if "model" not in answer:
        return "No model named: only the file is read."
    model, work, machine = answer["model"], answer["work"], answer["machine"]
    size = show_count(model["parameters"])
    if model["active_parameters"] != model["parameters"]:
        size += f", {show_count(model['active_parameters'])} active"
    where = f"{machine['ranks']}x {machine['card'] or 'CPU process'}"
    if machine["card"]:
        where += f" ({show_bytes(machine['usable_bytes'])} usable each)"
    host = f", host RAM {show_bytes(machine['host_bytes'])}" if machine["host_bytes"] else ""
    return (
        f"{model['name']} ({size} parameters) on {where}{host}\n"
        f"{work['batch_sequences']} sequences of {work['sequence_tokens']} tokens per step "
        f"({work['tokens_per_step']} tokens), {work['precision']}, {work['optimizer']}"
    )


def speed_table(strategies: list[dict[str, Any]], answer: dict[str, Any]) -> str:
    what = strategies[0].get("for", "")
    titles = ["strategy", "micro x accum", "per card", "host RAM", "disk", "tokens/s", "MFU", "links", what]
    if answer["machine"]["kind"] == "cpu":
        titles[2] = "per rank"
    body = []
    for s in strategies:
        speed = s["tokens_per_second"]
        body.append(
            [
                s["name"],
                f"{s['micro_batch']} x {s['accumulation']}",
                show_bytes(s["card_bytes"]),
                show_bytes(s["host_bytes"]),
                show_bytes(s["disk_bytes"]),
                f"{speed:,.0f}".replace(",", " ") if speed else "unknown",
                f"{s['mfu']:.0%}" if s["mfu"] is not None else "-",
                f"{s['communication_share']:.0%}" if s["communication_share"] is not None else "-",
                show_seconds(s["total_seconds"]) if "total_seconds" in s else "-",
            ]
        )
    return grid(titles, body)


def memory_table(strategies: list[dict[str, Any]], answer: dict[str, Any]) -> str:
    titles = ["GB at the peak", *(short for _, short in LEDGER)]
    body = [[s["name"], *(gigabytes(s["ledger"][row]) for row, _ in LEDGER)] for s in strategies]
    return grid(titles, body)


def gigabytes(value: float) -> str:
    number = value / 1e9
    return f"{number:.1f}" if number >= 0.1 or number == 0 else f"{number:.3f}"


def details(best: dict[str, Any], answer: dict[str, Any]) -> str:
    lines = []
    if best["clock"]:
        parts = sorted(((v, k) for k, v in best["clock"].items() if v > 0.005 * best["step_seconds"]), reverse=True)
        lines.append(
            f"A step of {best['name']}: {best['step_seconds']:.2f} s = "
            + ", ".join(f"{k} {v / best['step_seconds']:.0%}" for v, k in parts)
        )
    money = []
    if "kwh" in best:
        money.append(f"{best['kwh']:.3g} kWh at the cards' power limit")
    if "energy_money" in best:
        money.append(f"{best['energy_money']:.2f} for the energy")
    if "money" in best:
        money.append(f"{best['money']:.2f} at the given price")
    elif "rent_usd" in best:
        money.append(f"${best['rent_usd'][0]:.2f} to ${best['rent_usd'][1]:.2f} rented")
    if money:
        lines.append(f"{best['for']}: {', '.join(money)}")
    bars = answer["error_bars"]
    if bars.get("tokens_per_second_90_percent") and best["tokens_per_second"] and answer["machine"]["card"]:
        lines.append(
            f"Nine of ten predictions were within {bars['tokens_per_second_90_percent']:.0%} (speed) and "
            f"{bars['memory_90_percent']:.0%} (memory) of {bars['runs']} published runs, cross-validated"
        )
    return "\n".join(lines)


def refused_lines(refused: list[dict[str, Any]], rows: int) -> list[str]:
    found = []
    for entry in refused[:rows]:
        for why in entry["why"]:
            found.append(f"{entry['name']}: {why}" if entry["name"] else why)
        found += [f"  {line}" for line in need_lines(entry)]
    if len(refused) > rows:
        found.append(f"and {len(refused) - rows} more (--json)")
    return found


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


def grid(titles: list[str], body: list[list[str]]) -> str:
    """Return columns, the first flush left, the others flush right."""
    widths = [max(len(row[n]) for row in [titles, *body]) for n in range(len(titles))]
    lines = []
    for row in [titles, *body]:
        cells = [c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
