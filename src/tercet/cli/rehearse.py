"""tercet rehearse: two steps of the engine's own code, at full size, on simulated cards."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tercet.errors import NotLegalError
from tercet.planner.table import to_terminal
from tercet.units import show_bytes, show_seconds


def register(app: typer.Typer) -> None:
    @app.command()
    def rehearse(
        arguments: Annotated[
            list[str], typer.Argument(metavar="RECIPE|MODEL [key=value]...", help="A recipe, preset or model folder.")
        ],
        gpus: Annotated[str, typer.Option(help="Cards, as 3x4090.")],
        host_ram: Annotated[
            str | None, typer.Option(help="Host memory, as 128GiB; without it, it is not checked.")
        ] = None,
        links: Annotated[str | None, typer.Option(help="PCIe lanes of each card's slot, as x16,x8,x4.")] = None,
        output: Annotated[
            str | None,
            typer.Option(help="Folder for rehearsal.json, trace.json (Perfetto) and rehearsal.svg; a run's too."),
        ] = None,
        fault: Annotated[
            list[str] | None,
            typer.Option(metavar="KIND:N", help="oom, lost (from operator N on), copy (the Nth), slow (N times)."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Run two steps of the native engine on cards that are not there: what is held, what waits, what fits.

        Shapes only, full size; needs no GPU. Exit code 3 when a card runs out of memory.

        Example: tercet rehearse smollm2-135m --gpus 3x4090 strategy=zero3
        """
        run(arguments, gpus, host_ram, links, output, fault or [], as_json)


def run(
    arguments: list[str],
    gpus: str,
    host_ram: str | None,
    links: str | None,
    output: str | None,
    faults: list[str],
    as_json: bool,
) -> None:
    import orjson

    from tercet.planner.answer import read_recipe
    from tercet.spec.machine import machine_of

    given = read_faults(faults)
    machine = machine_of(gpus, host_ram, links)
    recipe, _ = read_recipe(arguments[0], arguments[1:], None, None, None)
    strategy, plan = _strategy(recipe, machine)

    from tercet.rehearsal.run import Faults, rehearse

    rehearsed, trace = rehearse(recipe, strategy, machine, Faults(**given))
    found = {"strategy": plan["name"], **rehearsed}
    found["planned"] = {
        "card_bytes": plan["card_bytes"],
        "step_seconds": plan["step_seconds"],
        "ledger": plan["ledger"],
    }
    text = orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()
    if output is not None:
        write(output, found, text, trace)
    typer.echo(text if as_json else to_terminal(table(found)))
    if not found["fits"] or found["failed"]:
        raise typer.Exit(1 if found["failed"] else 3)


FAULTS = ("oom", "lost", "copy", "slow")


def read_faults(words: list[str]) -> dict[str, Any]:
    """Return {kind: number} of --fault's words. Raises InputError for one that is not known."""
    from tercet.errors import InputError

    found: dict[str, Any] = {}
    for word in words:
        kind, _, number = word.partition(":")
        try:
            found[kind] = float(number) if kind == "slow" else int(number)
        except ValueError:
            found[kind] = 0
        if kind not in FAULTS or found[kind] <= 0:
            raise InputError(
                f"--fault {word}: not a fault with its number", f"For example oom:1200. There are {', '.join(FAULTS)}."
            )
    return found


def write(output: str, found: dict[str, Any], text: str, trace: dict[str, Any] | None) -> None:
    """Write rehearsal.json and, when a step was finished, trace.json and rehearsal.svg."""
    from pathlib import Path

    import orjson

    from tercet.report.rehearsed import picture

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rehearsal.json").write_text(text + "\n", encoding="utf-8")
    if trace is not None:
        (folder / "trace.json").write_bytes(orjson.dumps(trace))
        (folder / "rehearsal.svg").write_text(picture(found), encoding="utf-8")


def _strategy(recipe: Any, machine: Any) -> tuple[Any, dict[str, Any]]:
    """Return the planner's choice and its plan; where it says that nothing fits, what the recipe says as it stands."""
    from tercet.planner.answer import choose, predict
    from tercet.spec.strategy import Work, resolve, why_not
    from tercet.spec.trained import trained_model

    try:
        return choose(recipe, machine, machine.ranks)
    except NotLegalError:
        work = Work.of(recipe)
        strategy = resolve(recipe.strategy, machine.ranks if recipe.strategy.data != 1 else 1, work)
        if why_not(trained_model(recipe), strategy, work):
            raise
        return strategy, predict(recipe, strategy, machine)


def _difference(rehearsed: float, planned: float | None) -> list[str]:
    """Return a line where the two times are further apart than the plan's own range."""
    if not planned or 2 / 3 <= rehearsed / planned <= 1.5:
        return []
    return [
        f"  {rehearsed / planned:.2g} times the plan's: a plan adds up sums, a rehearsal each kernel in its order; only a "
        "measured run tells which is right"
    ]


def table(found: dict[str, Any]) -> str:
    """Return the rehearsal beside the plan, a line a figure."""
    peak, planned = found["peak"], found["planned"]
    usable = found["capacity_bytes"] + found["outside_bytes"]
    lines = [f"{found['strategy']}: {'fits' if found['fits'] else 'does not fit'} in {show_bytes(usable)} of a card"]
    if found["out_of_memory"]:
        lines.append(found["out_of_memory"])
    lines += [
        f"at the peak: {show_bytes(found['peak_bytes'])} in use, {show_bytes(found['reserved_bytes'])} reserved, "
        f"{show_bytes(found['outside_bytes'])} of context and NCCL; planned {show_bytes(planned['card_bytes'])} in all",
        f"  at operator {peak['number']}, {peak['operator']}",
        *(f"  {row:12} {show_bytes(size)}" for row, size in sorted(peak["rows"].items(), key=lambda x: -x[1])),
    ]
    if found["failed"]:
        lines.append(f"as asked for: {found['failed']}")
    if step := found.get("step"):
        busy = step["by_what_was_busy"]
        lines += [
            f"a step: {show_seconds(step['seconds'])} by the simulated clock (planned "
            f"{show_seconds(planned['step_seconds']) if planned['step_seconds'] else 'unknown'}), "
            f"{step['kernels']} kernels, {sum(step['host_waits'].values())} waits of the host",
            f"  to the card {show_bytes(step['bytes_to_card'])}, to the host {show_bytes(step['bytes_to_host'])}; "
            + (", ".join(f"{k} {n} times" for k, n in step["collectives"].items()) or "no collectives"),
            "  not hidden behind computing: "
            + ", ".join(f"{kind} {busy[kind] / step['seconds']:.0%}" for kind in ("collectives", "copies", "host")),
            *_difference(step["seconds"], planned["step_seconds"]),
        ]
    if found["host"]["pinned_bytes"]:
        lines.append(f"host memory pinned by this rank: {show_bytes(found['host']['pinned_bytes'])}")
    if save := found.get("save"):
        lines.append(f"a save: {show_bytes(save['bytes'])} of this rank, copied in {show_seconds(save['seconds'])}")
    return "\n".join(lines)
