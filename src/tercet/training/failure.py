"""Which error of several ranks came first: not the broken collectives that it caused on the others."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from tercet.errors import CardFullError, InterruptedRun, TercetError
from tercet.spec.memory_limit import memory_limit
from tercet.spec.run_folder import RunFolder, read_json
from tercet.training.session import resume_command
from tercet.units import show_bytes

# What NCCL's watchdog writes before it aborts a rank that has waited for another one.
WATCHDOG = ("watchdog caught collective operation timeout", "collective operation timeout: workncc")
LOG_TAIL_BYTES = 1 << 16


def first_error(
    run: RunFolder,
    codes: Sequence[int],
    stopped: str | None,
    ended_here: Collection[int] = (),
    told: Sequence[dict[str, Any]] = (),
) -> TercetError:
    """Return the error to tell of ranks that ended with `codes`, of which not all are 0.

    `stopped`: what to say when somebody asked for the end and no rank says more; None when nobody did.
    `ended_here`: ranks that did not end by themselves after another had failed. `told`: reports that ranks could not
    write into the run folder.
    """
    reports = [*error_reports(run, len(codes)), *told]
    interrupted = [r for r in reports if r["interrupted"]]
    own = sorted((r for r in reports if not r["echo"] and not r["interrupted"]), key=lambda r: r["time"])
    if own:
        return _from_report(own[0], run)
    if interrupted or stopped:
        return InterruptedRun(interrupted[0]["message"] if interrupted else stopped or "")
    killed = [(rank, -code) for rank, code in enumerate(codes) if code < 0 and rank not in ended_here]
    waited = [rank for rank, number in killed if number == signal.SIGABRT and _timed_out(run.log_of(rank))]
    killed = [(rank, number) for rank, number in killed if rank not in waited]
    if killed:
        return _killed(*killed[0], run, len(codes))
    echoes = [r for r in reports if r["echo"]]
    if ended_here and (echoes or waited):  # the others waited for ranks that never came
        return absent(
            run,
            sorted(ended_here),
            *((echoes[0]["step"], echoes[0]["message"]) if echoes else (None, "a collective timed out")),
        )
    if echoes:
        return _from_report(echoes[0], run)
    rank = next(rank for rank, code in enumerate(codes) if code)
    return TercetError(f"rank {rank} ended with code {codes[rank]}", f"Its log: {run.log_of(rank)}")


def error_reports(run: RunFolder, ranks: int) -> list[dict[str, Any]]:
    """Return what ranks have written about their own end, in rank order."""
    paths = [run.logs / f"error-rank-{rank}.json" for rank in range(ranks)]
    return [read_json(path) for path in paths if path.exists()]


def absent(run: RunFolder, ranks: Sequence[int], step: int | None, waited: str) -> TercetError:
    """Name the ranks for which the others waited, and where the first of them was."""
    names = ", ".join(map(str, ranks))
    stack = "\n".join(last_stack(run.log_of(ranks[0])))
    where = "" if step is None else f" (step {step})"
    return TercetError(
        f"rank {names} did not arrive where the others waited{where}: {waited}\nrank {ranks[0]} was here:\n{stack}",
        f"Logs: {run.logs}",
    )


def last_stack(log: Path, lines: int = 12) -> list[str]:
    """Return the newest stack that faulthandler wrote into a rank's log."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        text = []
    begin = next((i for i in range(len(text) - 1, -1, -1) if text[i].startswith("Current thread")), None)
    return text[begin : begin + lines] if begin is not None else ["(no stack in its log)"]


def _timed_out(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace").lower()
    except OSError:
        return False
    return any(sign in tail for sign in WATCHDOG)


def _from_report(report: dict[str, Any], run: RunFolder) -> TercetError:
    where, hint = "", report["hint"]
    if report.get("shared"):  # all ranks raised it: the message says whose fault it is
        hint = hint or f"Logs: {run.logs}"
    elif report["exit_code"] == 1:
        rows = ", ".join(map(str, report["rows"]))
        where = f"rank {report['rank']}, step {report['step']}" + (f", rows {rows}" if rows else "") + ": "
        hint = hint or f"Its log: {run.log_of(report['rank'])}"
    # Of the kind that it was on its rank: what comes of it (a run folder kept or not) hangs on that.
    kind = next(k for k in (*TercetError.__subclasses__(), TercetError) if k.exit_code == report["exit_code"])
    kind = CardFullError if report.get("card_full") else kind
    return _rebuilt(kind, where + report["message"], hint)


def _rebuilt(kind: type[TercetError], message: str, hint: str | None) -> TercetError:
    error = kind.__new__(kind)
    TercetError.__init__(error, message, hint)
    return error


def _killed(rank: int, number: int, run: RunFolder, ranks: int) -> TercetError:
    name = signal.Signals(number).name
    text = f"rank {rank} was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        memory, limit = psutil.virtual_memory(), memory_limit(ranks)
        allowed = f"{show_bytes(memory.total)} in this machine, {show_bytes(memory.available)} available now"
        if limit is not None and limit.bytes < memory.total:
            allowed = f"{show_bytes(limit.bytes)} allowed by {limit.source}; {allowed}"
        if planned := (run.read_plan() or {}).get("host_bytes"):
            allowed = f"{show_bytes(planned)} were planned; {allowed}"
        text += f"; if you did not do that, it was probably the kernel, because host RAM ran out ({allowed})"
    return TercetError(text, f"{resume_command(run)}. Its log: {run.log_of(rank)}")
