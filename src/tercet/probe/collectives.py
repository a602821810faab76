"""Rates of collectives between ranks: started as processes of their own, one measurement per transport."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tercet import children
from tercet.probe.selftest import check_collectives, last_words, start_ranks, wait_for_all

PAYLOAD_BYTES = {"cpu": 2**24, "cuda": 2**27}
# Hardware cannot break gloo; a machine that does much else is slow to start ranks.
LIMIT_SECONDS = {"gloo": 600.0, "nccl": 90.0}
CHECK_SECONDS = {"cpu": 300.0, "cuda": 20.0}


def transports(cards: int) -> dict[str, dict[str, str]]:
    """Return transport -> environment: what NCCL finds itself, without peer access, and over sockets; gloo on a CPU."""
    if cards < 2:
        return {"gloo": {}}
    return {
        "nccl": {},
        "nccl without peer access": {"NCCL_P2P_DISABLE": "1"},
        "nccl without peer access and shared memory": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    }


def measure(ranks: int, variables: dict[str, str], limit: float) -> dict[str, Any]:
    """Return {"verdict", "all_reduce", "all_gather", "reduce_scatter", "collective_latency"} of one transport.

    Rates are bus bandwidths as NCCL defines them (nccl-tests, PERFORMANCE.md): independent of the number of ranks
    on a ring. Without rates when the self-test fails or the processes do not end within `limit` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="tercet-probe-") as folder:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
        command = children.command("tercet.probe.collectives", folder)
        processes = start_ranks(ranks, command, {**variables, "OMP_NUM_THREADS": threads}, Path(folder))
        wait_for_all(processes, limit)
        file = Path(folder, "rates.json")
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
        return {"verdict": _why(Path(folder), [p.returncode for p in processes], limit)}


def _why(folder: Path, codes: list[int], limit: float) -> str:
    """Return why there are no rates: the first rank's own error, or that the ranks did not end in time."""
    for rank, code in enumerate(codes):
        if code > 0:  # those that were ended here have negative ones
            return f"rank {rank} ended with code {code}: {last_words(folder / f'output-{rank}')}"
    return f"did not end within {limit:g} s"


def ucc_available() -> bool:
    """Whether this PyTorch was built with UCC (the wheels are not)."""
    import torch.distributed as dist

    return bool(getattr(dist, "is_ucc_available", lambda: False)())


def main(folder: str) -> None:
    """One rank: self-test, then rates; rank 0 writes them."""
    import torch

    from tercet.parallel.world import open_world

    world = open_world(60 if torch.cuda.is_available() else 300, store_file=f"{folder}/store")
    verdict = check_collectives(world, CHECK_SECONDS[world.device.type])
    found: dict[str, Any] = {"verdict": verdict.says}
    if verdict.ok:
        found |= rates(world)
    if world.rank == 0 or not verdict.ok:
        publish(Path(folder), world.rank, found)
    os._exit(0)


def publish(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Write FOLDER/rates.json, unless a rank has: who comes later only saw that one leave."""
    temporary = folder / f"rates-{rank}.tmp"
    temporary.write_text(json.dumps(found), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / "rates.json")


def rates(world: Any) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    n, size = world.size, PAYLOAD_BYTES[world.device.type]
    count = size // 4 // n * n
    whole = torch.zeros(count, device=world.device)
    part = torch.zeros(count // n, device=world.device)
    tiny = torch.zeros(1, device=world.device)
    ring = (n - 1) / n
    found = {
        "all_reduce": 2 * ring * 4 * count / _seconds(world, lambda: dist.all_reduce(whole)),
        "all_gather": ring * 4 * count / _seconds(world, lambda: dist.all_gather_into_tensor(whole, part)),
        "collective_latency": _seconds(world, lambda: dist.all_reduce(tiny), times=20),
    }
    with contextlib.suppress(RuntimeError):  # older gloo has none
        found["reduce_scatter"] = ring * 4 * count / _seconds(world, lambda: dist.reduce_scatter_tensor(part, whole))
    return found


def _seconds(world: Any, run: Any, times: int = 5) -> float:
    """Return the median time of a collective; all ranks run it equally often."""
    import torch

    run()
    measured = []
    for _ in range(times):
        world.barrier()
        start = time.perf_counter()
        run()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


if __name__ == "__main__":
    main(sys.argv[1])
