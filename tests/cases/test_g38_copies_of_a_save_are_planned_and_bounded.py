"""G38: host memory for saves behind the next steps is planned; where it is short the state is saved piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tercet.planner.answer import plan
from tests.ranks import Ranks

GB = 10**9
KEYS = ["strategy=zero3", "strategy.recompute=full"]


def planned(host_ram: str | None) -> dict[str, Any]:
    answer = plan("llama-3.2-3b", KEYS, gpus="3x4090", host_ram=host_ram, sequence="1024", batch="12")
    return answer["strategies"][0]


def test_the_plan_counts_what_is_copied():
    best = planned("128GB")
    trained = 3_212_749_824
    assert best["host"]["loading"] == 12 * trained, "weights and two moments in fp32, of all ranks"
    assert best["saves_behind_steps"]
    assert best["host_bytes"] == sum(best["host"].values()) > 40 * GB
    assert planned(None)["host"]["loading"] == 12 * trained


def test_a_small_host_saves_in_pieces_and_is_not_refused():
    best = planned("32GB")
    assert not best["saves_behind_steps"]
    assert best["host"]["loading"] < 6 * GB
    assert best["host_bytes"] < 32 * GB


def test_state_on_the_host_is_not_copied():
    keys = ["strategy=deepspeed-zero3", "strategy.offload.optimizer=cpu", KEYS[1]]
    answer = plan("llama-3.2-3b", keys, gpus="3x4090", host_ram="128GB", sequence="1024", batch="12")
    best = answer["strategies"][0]
    assert not best["saves_behind_steps"]
    assert best["host"]["loading"] == 3 * 4 * 128_256 * 3072, "one tensor on its way, a rank"


@pytest.fixture(scope="module")
def process():
    pool = Ranks(1)  # of its own: PyTorch must know the simulated card before its first backward
    yield pool
    pool.stop()


def saved(world: Any, folder: str, free: float) -> Any:
    """Save from simulated cards with so much free host memory; return what was copied at once, and what a load finds."""
    import torch

    from tercet.engine import EngineSetup, open_engine, shards
    from tercet.parallel.world import World
    from tercet.rehearsal.device import Simulation
    from tercet.rehearsal.install import cards
    from tercet.spec import saving
    from tercet.spec.recipe import OptimSection
    from tests.tiny import micro_batches, tiny_model, tiny_strategy, whole_weights

    def engine(device: torch.device):
        strategy = tiny_strategy("single", 1, 4)
        return open_engine(EngineSetup(tiny_model(), strategy, OptimSection(), "fp32", World(0, 1, 0, device), seed=3))

    copies: list[int] = []
    write = shards.write_file

    def counted(path, tensors, metadata):
        copies.append(sum(t.nbytes for t in tensors.values()))
        write(path, tensors, metadata)

    cpu = engine(torch.device("cpu"))
    for step in range(2):
        cpu.step(micro_batches(step, 0, 1, 1, 4), 1e-2)
    now = Path(folder) / "cpu"
    now.mkdir()
    cpu.save(now).wait()
    usual = shards.free_bytes, saving.PIECE_BYTES
    shards.write_file = counted
    shards.free_bytes, saving.PIECE_BYTES = (lambda device, ranks: free), 20_000
    try:
        with cards(Simulation()):
            card = engine(torch.device("card", 0))
            card.load(now)
            there = Path(folder) / "card"
            there.mkdir()
            handle = card.save(there)
            handle.wait()
    finally:
        shards.write_file, shards.free_bytes, saving.PIECE_BYTES = write, *usual
    again = engine(torch.device("cpu"))
    again.load(there)
    same = all(
        torch.equal(a, b) for a, b in zip(whole_weights(again).values(), whole_weights(cpu).values(), strict=True)
    )
    return handle.background, copies, sorted(p.name for p in there.iterdir()), same


def test_with_room_the_save_goes_on_behind_the_steps(process, tmp_path):
    ((background, copies, files, same),) = process.run(saved, str(tmp_path), 1e12)
    assert background and len(copies) == 1 and files == ["rank-0.safetensors"] and same


def test_without_room_it_is_written_piece_by_piece(process, tmp_path):
    ((background, copies, files, same),) = process.run(saved, str(tmp_path), 1000)
    assert not background and same
    assert len(copies) == len(files) > 3
    assert max(copies) <= 20_000 and sum(copies) > 100_000


def test_the_smaller_limit_counts(monkeypatch):
    import torch

    from tercet.parallel import room
    from tercet.spec.memory_limit import MemoryLimit

    monkeypatch.setattr(room, "memory_limit", lambda ranks: MemoryLimit(3 * 10**9, "a group"))
    assert room.free_bytes(torch.device("cpu"), 3) < 10**9
