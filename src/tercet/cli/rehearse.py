"""tercet rehearse: two steps of the engine's own code, at full size, on simulated cards."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def rehearse(
        arguments: Annotated[
            list[str], typer.Argument(metavar="RECIPE|MODEL [key=value]...", help="A recipe, preset or model folder.")
        ],
        gpus: Annotated[str, typer.Option(help="Cards, as 3x4090.")],
        host_ram: Annotated[str | None, typer.Option(help="Host memory, as 128GiB.")] = None,
        links: Annotated[str | None, typer.Option(help="PCIe lanes of each card's slot, as x16,x8,x4.")] = None,
        output: Annotated[str | None, typer.Option(help="Folder for rehearsal.json.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ) -> None:
        """Run two steps of the native engine on cards that are not there: what is held, what waits, what fits.

        Shapes only, full size; needs no GPU. Exit code 3 when a card runs out of memory.

        Example: tercet rehearse smollm2-135m --gpus 3x4090 strategy=zero3
        """
        run(arguments, gpus, host_ram, links, output, as_json)


def run(
    arguments: list[str], gpus: str, host_ram: str | None, links: str | None, output: str | None, as_json: bool
) -> None:
    from pathlib import Path

    import orjson

    from tercet.planner.answer import read_recipe
    from tercet.spec.machine import machine_of

    machine = machine_of(gpus, host_ram, links)
    recipe, _ = read_recipe(arguments[0], arguments[1:], None, None, None)
    strategy, plan = _strategy(recipe, machine)

    from tercet.rehearsal.run import rehearse

    found = {"strategy": plan["name"], **rehearse(recipe, strategy, machine)}
    found["planned"] = {
        "card_bytes": plan["card_bytes"],
        "step_seconds": plan["step_seconds"],
        "ledger": plan["ledger"],
    }
    text = orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        (Path(output) / "rehearsal.json").write_text(text + "\n", encoding="utf-8")
    typer.echo(text if as_json else table(found))
    if not found["fits"]:
        raise typer.Exit(3)


def _strategy(recipe: Any, machine: Any) -> tuple[Any, dict[str, Any]]:
    """Return the planner's choice and its plan; where it says that nothing fits, what the recipe says as it stands."""
    from tercet.errors import NotLegalError
    from tercet.planner.answer import choose, predict
    from tercet.spec.families import describe
    from tercet.spec.strategy import Work, resolve, why_not

    try:
        return choose(recipe, machine, machine.ranks)
    except NotLegalError:
        work = Work.of(recipe)
        strategy = resolve(recipe.strategy, machine.ranks if recipe.strategy.data != 1 else 1, work)
        if why_not(describe(recipe.model), strategy, work):
            raise
        return strategy, predict(recipe, strategy, machine)


def table(found: dict[str, Any]) -> str:
    """Return the rehearsal beside the plan, a line a figure."""
    from tercet.units import show_bytes, show_seconds

    peak, planned = found["peak"], found["planned"]
    lines = [
        f"{found['strategy']}: {'fits' if found['fits'] else 'does not fit'} in {show_bytes(found['capacity_bytes'])}"
    ]
    if found["out_of_memory"]:
        lines.append(found["out_of_memory"])
    lines += [
        f"at the peak: {show_bytes(found['peak_bytes'])} in use, {show_bytes(found['reserved_bytes'])} reserved "
        f"(planned {show_bytes(planned['card_bytes'])}), at operator {peak['number']}, {peak['operator']}",
        *(f"  {row:12} {show_bytes(size)}" for row, size in sorted(peak["rows"].items(), key=lambda x: -x[1])),
    ]
    if step := found.get("step"):
        lines += [
            f"a step: {show_seconds(step['seconds'])} by the simulated clock (planned "
            f"{show_seconds(planned['step_seconds']) if planned['step_seconds'] else 'unknown'}), "
            f"{step['kernels']} kernels, {sum(step['host_waits'].values())} waits of the host",
            f"  to the card {show_bytes(step['bytes_to_card'])}, to the host {show_bytes(step['bytes_to_host'])}; "
            + (", ".join(f"{k} {n} times" for k, n in step["collectives"].items()) or "no collectives"),
        ]
    return "\n".join(lines)
