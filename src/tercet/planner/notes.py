"""What a user should know of a plan besides its table: what limits, what fewer cards do, what is missing here."""

from __future__ import annotations

from importlib.util import find_spec

from tercet.planner.ledger import swap_bytes
from tercet.planner.legal import fp8_gain
from tercet.planner.search import Candidate, Search
from tercet.spec.axes.split import either
from tercet.spec.families.through_transformers import ESTIMATED
from tercet.spec.recipe import Recipe
from tercet.spec.strategy import nearest_batches
from tercet.units import show_bytes


def notes(search: Search, fits: list[Candidate], recipe: Recipe, ranks: int) -> list[str]:
    """Return what a user should know besides the table."""
    found, machine, work = [], search.machine, search.work
    if search.counts.model.module == "transformers":
        found.append(ESTIMATED)
    if fits and recipe.adapter.kind != "none" and not recipe.model.pretrained:
        found.append(
            f"an adapter stands on trained weights, which {recipe.model.start} are not: the last line holds FOLDER in "
            "place of a model's folder or hub name"
        )
    if machine.card is None and not machine.measured:
        found.append(
            "speed unknown until `tercet doctor` has measured this machine; ranked by what is recomputed and sent"
        )
    if fits and fits[0].rows and fits[0].seconds:
        best = fits[0]
        share = (best.rows["communication"] + best.rows["host"]) / best.seconds  # type: ignore[index, operator]
        if share > 0.5:
            found.append(
                f"communication limits: {share:.0%} of the step waits for PCIe and collectives even in the best strategy; "
                "a larger train.batch_sequences, wider slots or fewer cards would use the processors better"
            )
        found += _against_fewer(search, best, recipe, ranks)
    if fits:
        idle = fits[0].strategy.idle_rows(work.batch_sequences)
        if idle:
            below, above = nearest_batches(fits[0].strategy, work.batch_sequences)
            found.append(
                f"train.batch_sequences {work.batch_sequences} pads the last micro-batches with {idle} empty sequences "
                f"(computed, weighing nothing); {either(sorted({below, above}))} needs none"
            )
    if any(c.strategy.engine == "deepspeed" for c in fits) and find_spec("deepspeed") is None:
        found.append("engine deepspeed needs an install that is not here: pip install 'tercet[deepspeed]'")
    if fits and fits[0].job.nvme:
        rate = machine.known("disk_write", search.constants.nvme_rate)
        word = "which is assumed (tercet doctor measures it)"
        if "disk_write" in machine.measured:
            word = "as measured by tercet doctor"
        elif machine.host is not None and machine.host.drive:
            word = "as described"
        found.append(
            f"files on nvme: {show_bytes(swap_bytes(search.counts, fits[0].job))} are written in every step, by all "
            f"ranks to one drive (drives wear by bytes written); at {rate / 1e9:.1f} GB/s, {word}; "
            "--what-if host_ram shows what more memory would bring"
        )
    if work.fp16_accumulation:
        found.append(
            "train.fp16_accumulation: sums of matmuls are rounded to 11 bits on the way and overflow at 65504; overflowing "
            "steps are skipped, but compare the loss with a run without it before you trust one with it"
        )
    gain = fp8_gain(machine)
    if gain and work.precision == "bf16" and machine.card:
        found.append(
            f"{machine.card.name} has fp8 tensor cores at {gain:.1f} times bf16's rate; "
            "training in fp8 is not built yet"
        )
    return found


def _against_fewer(search: Search, best: Candidate, recipe: Recipe, ranks: int) -> list[str]:
    """Say when fewer cards are as fast, or how well all of them scale (E02)."""
    speed = best.tokens_per_second
    if ranks == 1 or best.strategy.ranks == 1 or not speed:
        return []
    fewer = {n: found for n in _fewer(ranks) if (found := _speed_with(search, recipe, n, best))}
    if not fewer:
        return []
    count = max(fewer, key=lambda n: (fewer[n], -n))
    rank = "card" if search.machine.card else "process"
    if fewer[count] > 1.02 * speed:
        word = f"one {rank}" if count == 1 else f"{count} {rank}s"
        use, why = f"--ranks {count}", "over these slots"
        if search.machine.cards and (card := search.machine.widest(count).card):
            use, why = f"--gpus '{count}x{card.name}'", "where the slowest decides"
        return [
            f"{ranks} {rank}s are slower than {word} {why}: {speed:,.0f} against {fewer[count]:,.0f} "
            f"tokens/s; use {use}".replace(",", " ")
        ]
    if 1 not in fewer:
        return []
    factor = speed / fewer[1]
    return [f"{factor:.2f} times the speed of one {rank} ({factor / ranks:.0%} of ideal)"]


def _fewer(ranks: int) -> list[int]:
    """Return the numbers of ranks below `ranks` worth trying: one, and the next smaller that is commonly used."""
    return sorted({1, max(n for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64) if n < ranks)})


def _speed_with(search: Search, recipe: Recipe, ranks: int, best: Candidate) -> float | None:
    """Return the best strategy's tokens/s on some of the machine's ranks, those with the widest links; None: none fits."""
    fewer = Search(search.counts, search.work, search.machine.widest(ranks), search.constants)
    section = (
        recipe.strategy
        if ranks > 1
        else recipe.strategy.model_copy(update={"zero": "auto", "reduce_gradients": "auto"})
    )
    found = fewer.run(section, ranks, deepspeed=best.job.deepspeed, files=bool(best.job.nvme)).fits
    return found[0].tokens_per_second if found else None
