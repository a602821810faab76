"""C01 (planner) and D13 (planner): the save's peak is planned, and the disk figures are what files really take."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tercet.planner.answer import plan
from tercet.planner.constants import load
from tercet.planner.job import of_strategy
from tercet.planner.ledger import disk_rows, moments, phases
from tercet.spec.counts import Counts
from tercet.spec.families import preset
from tercet.spec.strategy import Strategy, Work
from tests.tiny import tiny_model

BYTES = {"fp32": (torch.float32, 4), "bf16": (torch.bfloat16, 2)}


def test_saving_adds_one_tensor_at_most():
    counts = Counts(preset("deepseek-llm-7b"))
    job = of_strategy(Strategy(ranks=3, zero=3, reduce_gradients="every_micro_batch"), Work(2048, 96))
    between = sum(moments(counts, job, load())["between_steps"].values())
    assert phases(counts, job, load())["save"] - between == 4 * counts.largest_tensor


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_models_file_is_as_large_as_planned(tmp_path, dtype):
    model = tiny_model(width=128, ffn=256, vocabulary=1000)
    torch_type, size = BYTES[dtype]
    save_file(
        {t.name: torch.zeros(t.shape, dtype=torch_type) for t in model.tensors()},
        tmp_path / "model.safetensors",
    )
    planned = disk_rows(Counts(model), of_strategy(Strategy(), Work(16, 4)), keep=2, model_bytes=size)["export"]
    assert (tmp_path / "model.safetensors").stat().st_size == pytest.approx(planned, rel=0.05)


def test_checkpoints_hold_three_fp32_copies_and_one_is_being_written():
    counts = Counts(tiny_model())
    planned = disk_rows(counts, of_strategy(Strategy(), Work(16, 4)), keep=2, model_bytes=2)["checkpoint"]
    assert planned == 12 * counts.parameters * 3


def test_the_wanted_type_decides_the_export():
    sizes = {
        dtype: plan("llama-3.2-1b", [f"output.model_dtype={dtype}"], gpus="3x4090")["strategies"][0]["disk"]["export"]
        for dtype in ("fp32", "bf16")
    }
    assert sizes["fp32"] == 2 * sizes["bf16"] == 4 * 1_235_814_400
