"""tercet list: the presets, recipes and cards that are known here."""

from __future__ import annotations

import shutil
from itertools import takewhile
from typing import Annotated, Any

import typer

from tercet.errors import InputError, nearest
from tercet.planner.table import grid, wrapped
from tercet.units import show_bytes, show_count

EXAMPLE = "Example: tercet list cards"


def register(app: typer.Typer) -> None:
    @app.command("list", epilog=EXAMPLE)
    def list_(
        what: Annotated[
            str | None, typer.Argument(metavar="[presets|recipes|cards]", help="One of the three; default: all.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Show the presets, recipes and cards that plan and train know by name."""
        run(what, as_json)


def run(what: str | None, as_json: bool) -> None:
    kinds = {"presets": presets, "recipes": recipes, "cards": cards}
    if what is not None and what not in kinds:
        raise InputError(f"{what!r} is not one of {', '.join(kinds)}{nearest(what, kinds)}")
    found = {kind: rows() for kind, rows in kinds.items() if what in (None, kind)}
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    width = shutil.get_terminal_size().columns
    typer.echo("\n\n".join(_section(kind, rows, width) for kind, rows in found.items()))


def presets() -> list[dict[str, Any]]:
    from tercet.spec.families import preset
    from tercet.spec.families import presets as known

    models = [preset(name) for name in known()]
    return [
        {
            "name": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "context_tokens": model.context_tokens,
            "vocabulary": model.vocabulary,
        }
        for model in sorted(models, key=lambda m: m.parameters)
    ]


def recipes() -> list[dict[str, Any]]:
    from tercet.spec.recipe import shipped_recipes

    found = []
    for name, path in shipped_recipes().items():
        found.append({"name": name, "says": opening(path.read_text(encoding="utf-8")), "file": str(path)})
    return found


def opening(text: str) -> str:
    """Return the paragraph that a recipe's comment opens with, over as many lines as it takes."""
    lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


def cards() -> list[dict[str, Any]]:
    from tercet.spec.machine import gpus

    return [
        {
            "name": card.name,
            "memory_bytes": card.memory_bytes,
            "usable_bytes": card.usable_bytes,
            "bf16_flops": card.flops.get("bf16"),
            "bandwidth_bytes_per_s": card.bandwidth,
            "peer_access": card.peer_access,
        }
        for card in gpus().values()
    ]


def _section(kind: str, rows: list[dict[str, Any]], width: int) -> str:
    if kind == "recipes":
        lines = [wrapped(f"{row['name']}: {row['says']}", width) for row in rows]
        return "\n".join(["Recipes (tercet train NAME):", *lines])
    if kind == "presets":
        columns = {
            "preset (tercet plan NAME)": [row["name"] for row in rows],
            "parameters": [show_count(row["parameters"]) for row in rows],
            "active": [show_count(row["active_parameters"]) for row in rows],
            "context": [str(row["context_tokens"]) for row in rows],
            "vocabulary": [str(row["vocabulary"]) for row in rows],
        }
    else:
        columns = {
            "card (--gpus 3xNAME)": [row["name"] for row in rows],
            "memory": [show_bytes(row["memory_bytes"]) for row in rows],
            "usable": [show_bytes(row["usable_bytes"]) for row in rows],
            "bf16 TFLOP/s": [f"{f / 1e12:.0f}" if (f := row["bf16_flops"]) else "-" for row in rows],
            "peer access": ["yes" if row["peer_access"] else "no" for row in rows],
        }
    return grid(columns)
