"""C04: loading on three ranks takes, at its highest, about one model's memory of all together, tied or not."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import psutil
import pytest
import torch

from tercet.spec.families import describe
from tercet.spec.placement import region
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model, stored_weights
from tercet.weights.writing import save_folder
from tests.tiny import tiny_engine, tiny_model, tiny_strategy

MEGABYTES = 200


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    spec = tiny_model(layers=12, width=512, heads=8, kv_heads=8, ffn=1408, vocabulary=12_000, tied=request.param)
    generator = torch.Generator().manual_seed(0)
    tensors = ((t.name, torch.randn(t.shape, generator=generator)) for t in spec.tensors())
    path = tmp_path_factory.mktemp("big")
    save_folder(path, spec, tensors, torch.float32)
    return path


def no_moments(engine, in_blocks: bool) -> None:
    for part in engine.layout.parts:
        engine.optimizer.state[part.value] = {"exp_avg": torch.zeros(0), "exp_avg_sq": torch.zeros(0)}


def load_on_a_rank(world, folder):
    """Return (growth of this rank's memory in bytes, its highest growth, its shards) of a sharded engine that starts
    from the folder.
    """
    from tercet.engine import EngineSetup
    from tercet.engine.native import NativeEngine
    from tercet.spec.recipe import OptimSection

    spec = describe(ModelSection(path=folder))
    tiny_engine(world, tiny_strategy("zero3", world.size, 3))  # what the libraries themselves take is taken now
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what an earlier test freed would be used again, and not be seen
    process = psutil.Process()
    before = process.memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here (proc(5))
    make_moments = NativeEngine._make_moments
    NativeEngine._make_moments = no_moments  # weights alone are weighed here
    try:
        strategy = tiny_strategy("zero3", world.size, 3)
        weights = stored_weights(folder, spec)
        engine = NativeEngine(EngineSetup(spec, strategy, OptimSection(), "fp32", world, seed=0, weights=weights))
    finally:
        NativeEngine._make_moments = make_moments
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    highest = int(peak.split()[1]) * 1024 - before
    grown = process.memory_info().rss - before
    return grown, highest, {p.name: (p.region.begin, p.value.double().sum().item()) for p in engine.layout.parts}


def test_together_one_model(pools, folder):
    size = (folder / "model.safetensors").stat().st_size
    assert size > 0.6 * MEGABYTES * 1e6
    results = pools[3].run(load_on_a_rank, str(folder))
    together = sum(grown for grown, _, _ in results)
    assert together < 1.5 * size, f"{together / 1e6:.0f} MB on three ranks for a file of {size / 1e6:.0f} MB"
    # One model, and for a moment embedding and head (a quarter of this one) twice. Whole tensors would make it two.
    highest = sum(highest for _, highest, _ in results)
    assert highest < 1.75 * size, f"{highest / 1e6:.0f} MB on three ranks for a file of {size / 1e6:.0f} MB"
    expected = dict(load_model(folder).named_parameters())
    for rank, (_, _, shards) in enumerate(results):
        for name, (begin, total) in shards.items():
            rows = region(expected[name].shape[0], 3, rank)
            assert begin == rows.begin
            assert total == pytest.approx(expected[name][rows.slice].double().sum().item(), rel=1e-12)
