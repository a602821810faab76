"""The examination: look, test, measure, remember."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tercet.errors import InputError
from tercet.probe import collectives, processor
from tercet.probe.inventory import Finding, findings, inventory
from tercet.probe.machine_file import update
from tercet.spec.cards import INSTALL_FOR_CARDS
from tercet.spec.machine import MEASURED, card_here, read_machine_file
from tercet.units import show_bytes

CPU_RANKS = 3
AROUND_IT = "train sets the environment around it."
ONCE_MORE = "Plans know no speed of several ranks until tercet doctor, given again, has measured it."


def examine(ranks: int | None, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return {"inventory", "findings", "rates", "transports", "machine_file"}; the last three empty when `quick`."""
    found = inventory(Path.cwd())
    report: dict[str, Any] = {"inventory": found, "findings": findings(found), "rates": {}, "transports": {}}
    if not quick:
        _measure(report, ranks, say)
    report["findings"] = [asdict(f) for f in report["findings"]]
    return report


def _measure(report: dict[str, Any], ranks: int | None, say: Callable[[str], None]) -> None:
    cards = report["inventory"]["cards"]
    if cards and not processor.devices():
        raise InputError(
            f"this machine has cards ({cards[0]['name']}), but PyTorch finds none that it can use", INSTALL_FOR_CARDS
        )
    say("measuring matmul, memory, AdamW, disk …")
    rates = processor.all_rates(Path.cwd())
    count = ranks or (len(cards) if cards else CPU_RANKS)
    working = None
    if count > 1:
        for name, variables in collectives.transports(len(cards)).items():
            say(f"measuring collectives of {count} ranks: {name} …")
            result = collectives.measure(count, variables, collectives.LIMIT_SECONDS["nccl" if cards else "gloo"])
            report["transports"][name] = {**result, "environment": variables}
            if "all_reduce" in result:
                working = working or (name, variables, result)
            else:
                report["findings"].insert(
                    0,
                    Finding("warning", f"{name}: {result['verdict']}", AROUND_IT if len(cards) > 1 else ONCE_MORE),
                )
        if working:
            rates |= {k: v for k, v in working[2].items() if k != "verdict"}
    if not collectives.ucc_available():
        report["findings"].append(Finding("note", "this PyTorch has no UCC (the wheels do not): not measured"))
    report["rates"] = rates
    content: dict[str, Any] = {
        "kind": "gpu" if cards else "cpu",
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
        "measured": {k: v for k, v in rates.items() if k in MEASURED},
        "ranks": count,
        "corrections": {},  # they stood on the rates that have just been measured anew
    }
    if cards:
        content["cards"] = _unknown_cards(cards, processor.devices(), say)
        # What NCCL finds by itself decides: with peer access switched off by a repair there is none.
        content["peer_access"] = bool(rates.get("peer_access")) and bool(working) and not working[1]
        if working:
            content["collectives"] = {
                "fingerprint": f"{count}x {cards[0]['name']}, driver {cards[0].get('driver_version', '?')}",
                "environment": working[1],
            }
    report["machine_file"] = str(update(content))


def _unknown_cards(
    rows: list[dict[str, str]], devices: list[Any], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Return name -> measured block of every card here that the shipped table lacks, and of those measured before."""
    found = dict((read_machine_file() or {}).get("cards", {}))
    for row, device in zip(rows, devices, strict=False):
        try:
            card_here(row, {})
        except InputError:
            say(f"measuring {row['name']}, which the shipped table does not have …")
            found[row["name"]] = processor.card_entry(row, device)
    return found


def show(report: dict[str, Any]) -> str:
    found = report["inventory"]
    lines = [
        f"{found['system']}, Python {found['python']}, {found['cores']} cores",
        "packages: " + ", ".join(f"{k} {v or 'missing'}" for k, v in found["packages"].items()),
        f"RAM {show_bytes(found['host_bytes'])} ({show_bytes(found['host_available_bytes'])} free), "
        f"swap {show_bytes(found['swap_bytes'])}, /dev/shm {show_bytes(found['shared_memory_bytes'] or 0)}, "
        f"disk {show_bytes(found['disk_free_bytes'])} free here",
    ]
    if found["cards"]:
        for n, card in enumerate(found["cards"]):
            lines.append(
                f"card {n}: {card['name']}, {card['memory.total']} MiB, PCIe {card['pcie.link.gen.max']} "
                f"x{card['pcie.link.width.current']}, driver {card['driver_version']}, {card['power.limit']} W"
            )
        lines.append(f"CUDA compiler: {found['nvcc'] or 'none'}")
    else:
        lines.append("no NVIDIA card (nvidia-smi is not there or names none): runs go to the CPU")
    lines += [f"{f['level']}: {f['what']}" + (f" - {f['advice']}" if f["advice"] else "") for f in report["findings"]]
    lines += [f"{name:22} {_rate(name, value)}" for name, value in report["rates"].items()]
    for name, result in report["transports"].items():
        lines.append(f"{name}: {result['verdict']}")
    if "machine_file" in report:
        lines.append(
            f"Written to {report['machine_file']}; plan and train use it. Delete it to go back to data sheets."
        )
    return "\n".join(lines)


def _rate(name: str, value: float) -> str:
    if name.startswith("matmul"):
        return f"{value / 1e12:.2f} TFLOP/s"
    if name == "collective_latency":
        return f"{value * 1e6:.0f} µs"
    if name == "cpu_adam":
        return f"{value / 1e6:.0f} M parameters/s"
    if name == "process":
        return f"{show_bytes(value)} before a rank holds a model"
    if name == "peer_access":
        return "yes" if value else "no"
    return f"{value / 1e9:.2f} GB/s"
