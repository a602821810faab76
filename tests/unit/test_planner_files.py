"""DeepSpeed's and Accelerate's files: what they mean, what does nothing, contradicts itself or is misspelt."""

from __future__ import annotations

import json

import pytest

from tercet.errors import InputError
from tercet.planner.launcher_files.plan import plan_from_files
from tercet.planner.launcher_files.read import read_accelerate, read_deepspeed

# The settings of a published set-up: ZeRO-3 through Accelerate, without the key that would switch it on.
WITHOUT_TYPE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
  zero_stage: 3
  allgather_partitions: true
  allgather_bucket_size: 500000000
  reduce_scatter: true
  overlap_comm: true
  load_from_fp32_weights: true
fp16: true
mixed_precision: fp16
num_processes: 3
"""
# ZeRO-2 with the optimizer on the host, fp16, batch 12 over three cards with accumulation 4.
ZERO2_HOST = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
}


def zero(section: dict) -> dict:
    return {"zero_optimization": section}


def kinds(reading) -> dict[str, str]:
    return {key: kind for key, kind, _ in reading.findings}


def test_accelerate_file_without_a_type(tmp_path):
    file = tmp_path / "zero3.yaml"
    file.write_text(WITHOUT_TYPE)
    answer = plan_from_files(
        "llama-1.2b-32k", [], None, str(file), {"gpus": "3x4090", "sequence": "512", "batch": "12"}
    )
    found = {f["key"]: f for f in answer["findings"]}
    assert "distributed_type: DEEPSPEED" in found["distributed_type"]["says"]
    assert found["deepspeed_config.load_from_fp32_weights"]["kind"] == "dead"
    assert found["deepspeed_config.overlap_comm"]["kind"] == "dead"
    assert found["fp16"]["kind"] in ("unknown", "contradiction")
    assert answer["means"]["zero"] == 3 and answer["means"]["precision"] == "fp16" and answer["means"]["ranks"] == 3
    need = answer["asked"]
    assert need["strategy"]["zero"] == 3 and not need["why"]
    assert 5e9 < need["card_bytes"] < 25e9  # it fits a 4090
    assert answer["strategies"]  # what the planner would take instead


def test_zero2_with_the_optimizer_on_the_host(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO2_HOST))
    answer = plan_from_files("deepseek-llm-7b", [], str(file), None, {"gpus": "3x4090", "sequence": "512"})
    means = answer["means"]
    assert (means["micro_batch"], means["accumulation"], means["batch"]) == (1, 4, 12)
    need = answer["asked"]
    assert need["host"]["states"] == 12 * 6_910_365_696  # fp32 master and two moments: 83 GB
    assert need["host"]["states"] + need["host"]["pinned"] >= 16 * 6_910_365_696  # 111 GB with fp32 gradients
    assert need["ledger"]["optimizer"] == need["ledger"]["master"] == 0
    # Four micro-batches are added up in fp32 on the card, in the rank's part: with them it does not fit.
    assert need["ledger"]["gradients"] == 4 * 6_910_365_696 // 3
    assert need["recomputing"]["card_bytes"] > 30e9
    file.write_text(json.dumps(ZERO2_HOST | {"gradient_accumulation_steps": 1}))
    at_once = plan_from_files("deepseek-llm-7b", [], str(file), None, {"gpus": "3x4090", "sequence": "512"})
    assert at_once["means"]["micro_batch"] == 4 and at_once["asked"]["ledger"]["gradients"] == 0
    assert 13.8e9 < at_once["asked"]["recomputing"]["card_bytes"] < 25e9


@pytest.mark.parametrize(
    ("change", "key", "kind", "words"),
    [
        (zero({"stage": 2, "overlap_com": True}), "zero_optimization.overlap_com", "unknown", "overlap_comm"),
        ({"train_batchsize": 3}, "train_batchsize", "unknown", "train_batch_size"),
        (zero({"stage": 3, "legacy_stage1": True}), "zero_optimization.legacy_stage1", "dead", "1 and 2"),
        (zero({"stage": 2, "sub_group_size": 1}), "zero_optimization.sub_group_size", "dead", "stage 3"),
        (zero({"stage": 1, "offload_param": {"device": "cpu"}}), "zero_optimization.offload_param", "dead", "stage 3"),
        ({"bf16": {"enabled": True}}, "fp16", "contradiction", "both enabled"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_batch_size", "contradiction", "is not micro-batch 2"),
        ({"train_batch_size": 13}, "train_batch_size", "contradiction", "12 or 24"),
        (zero({"stage": 2, "cpu_offload": True}), "zero_optimization.cpu_offload", "note", "offload_optimizer"),
        ({"fp16": True}, "fp16", "refused", "section"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing", "dead", "recompute"),
    ],
)
def test_keys_of_a_deepspeed_file(change, key, kind, words):
    reading = read_deepspeed({**ZERO2_HOST, **change}, "ds.json", 3)
    assert (key, kind) in [(k, n) for k, n, _ in reading.findings]
    assert any(words in s for k, _, s in reading.findings if k == key)


def test_a_clean_file_has_no_complaints():
    assert set(kinds(read_deepspeed(ZERO2_HOST, "ds.json", 3)).values()) == {"note"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "none, cpu or nvme"),
        ({"train_batch_size": "many"}, "whole number"),
        ({"zero_optimization": 7}, "section"),
    ],
)
def test_values_that_cannot_be(content, words):
    with pytest.raises(InputError, match=words):
        read_deepspeed(content, "ds.json", 3)


def test_fsdp_and_broken_files(tmp_path):
    reading = read_accelerate(
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_reshard_after_forward": False,
                "fsdp_auto_wrap_polcy": "x",
            },
            "num_proceses": 3,
        },
        "a.yaml",
    )
    assert reading.zero == 2
    found = kinds(reading)
    assert found["fsdp_sharding_strategy"] == "dead"
    assert found["fsdp_config.fsdp_auto_wrap_polcy"] == found["num_proceses"] == "unknown"
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": [1,\n "b"')
    with pytest.raises(InputError, match="line"):
        plan_from_files(None, [], str(broken), None, {})
