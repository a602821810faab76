"""The cards' sensors during a run: heat, power, throttling, and a card that is no longer there.

Asked through nvidia-smi by the supervisor, in a thread of its own: a driver that hangs must not hold up the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson

from tercet.probe.inventory import SENSORS, Finding, number_of, sensor_findings, throttles_of
from tercet.spec.run_folder import RunFolder

INTERVAL_SECONDS = 15.0
LIMIT_SECONDS = 30.0
LOOKS_UNTIL_LOST = 2  # one look may fail while the driver is busy
QUERY = (*SENSORS, "pci.bus_id")


class CardWatch:
    """`with CardWatch(...) as watch:` `watch.lost` names a card of this run that has vanished, or is None."""

    def __init__(self, run: RunFolder, ranks: int, say: Callable[[str], None], interval: float = INTERVAL_SECONDS):
        self.lost: str | None = None
        self._run, self._ranks, self._say, self._interval = run, ranks, say, interval
        self._said: set[str] = set()
        self._missing: dict[str, int] = {}
        self._silent_looks = 0  # one after another without an answer
        self._known: dict[str, dict[str, str]] = {}
        self._over = threading.Event()

    def __enter__(self) -> CardWatch:
        if shutil.which("nvidia-smi") is not None:
            threading.Thread(target=self._watch, name="cards", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        rows, _ = look()
        self._known = {row["index"]: row for row in rows}
        while self._known and not self._over.wait(self._interval):
            rows, complaint = look()
            self._note(rows)
            self._find_missing(rows, complaint)

    def _note(self, rows: list[dict[str, str]]) -> None:
        found = [f for f in sensor_findings(rows) if f.level == "warning"]
        if rows:
            append_event(self._run, "cards", cards=[reading(r) for r in rows], warnings=[f.what for f in found])
        for finding in found:
            self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        kind = finding.what.rpartition(" is ")[0] + finding.advice  # not again for every degree
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"{finding.what}. {finding.advice}".rstrip(". ") + ".")

    def _find_missing(self, rows: list[dict[str, str]], complaint: str) -> None:
        here = {row["index"] for row in rows}
        named = {index for index, row in self._known.items() if row.get("pci.bus_id", "?") in complaint}
        if not rows and not named:
            # The tool does not answer (a driver replaced under a running job, a time-out): that says nothing of the cards.
            self._silent_looks += 1
            if self._silent_looks == LOOKS_UNTIL_LOST:
                self._say(
                    f"nvidia-smi no longer answers ({complaint or 'it lists no card'}); training goes on unwatched"
                )
            return
        self._silent_looks = 0
        for index in self._known:
            # With no row at all, a card that the complaint names is the one that is gone.
            gone = index not in here and (bool(rows) or index in named)
            self._missing[index] = self._missing.get(index, 0) + 1 if gone else 0
        lost = [index for index, looks in self._missing.items() if looks == LOOKS_UNTIL_LOST]
        if not lost:
            return
        names = ", ".join(f"card {index} ({self._known[index].get('name')})" for index in lost)
        text = f"{names} no longer answer{'s' if len(lost) == 1 else ''}" + (f": {complaint}" if complaint else "")
        append_event(self._run, "cards_lost", cards=[int(i) for i in lost if i.isdigit()], says=text)
        if used_cards(self._ranks, list(self._known)) & set(lost):
            self.lost = text
        else:
            self._say(f"{text}; this run does not use it")


def look() -> tuple[list[dict[str, str]], str]:
    """Return (one row per card that answers, what nvidia-smi complained of in one line)."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi: {type(error).__name__}"
    cells = [[cell.strip() for cell in line.split(",")] for line in found.stdout.splitlines()]
    rows: list[dict[str, str]] = [dict(zip(QUERY, row, strict=True)) for row in cells if len(row) == len(QUERY)]
    rest = [",".join(row) for row in cells if len(row) != len(QUERY)] + found.stderr.splitlines()
    return rows, " ".join(line.strip() for line in rest if line.strip())


def used_cards(ranks: int, present: list[str]) -> set[str]:
    """Return the indices of the cards that the ranks compute on; all of them when names hide which."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    order = [v.strip() for v in visible.split(",")] if visible else present
    return set(order[:ranks]) if all(v in present for v in order) else set(present)


def reading(row: dict[str, str]) -> dict[str, Any]:
    """Return one card's sensors as numbers; None where the card does not tell."""
    return {
        "card": row["index"],
        "name": row["name"],
        "celsius": number_of(row["temperature.gpu"]),
        "watts": number_of(row["power.draw"]),
        "watts_limit": number_of(row["power.limit"]),
        "clock_mhz": number_of(row["clocks.sm"]),
        "slowed_by": throttles_of(row),
    }


def append_event(run: RunFolder, kind: str, **fields: Any) -> None:
    """Add a line to events.jsonl beside rank 0, which appends too: one write each, so lines never mix."""
    line = orjson.dumps({"event": kind, "time": time.time(), **fields}) + b"\n"
    try:
        with run.events.open("ab", buffering=0) as file:
            file.write(line)
    except OSError:  # a full disk: rank 0 says so
        pass
