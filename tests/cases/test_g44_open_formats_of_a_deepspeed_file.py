"""G44: a DeepSpeed file's "auto" is filled from the recipe, `mixed_precision: no` is fp32, a key twice is refused."""

from __future__ import annotations

import json

import pytest
import yaml

from tercet.errors import InputError
from tercet.planner.launcher_files.content import read_file
from tercet.planner.launcher_files.plan import plan_from_files
from tests.unit.test_planner_cli import tercet

SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
OPEN = {"fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"}}
SIZES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
STAGE_2 = {**OPEN, **SIZES, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
# As the trainers' examples have them: all sizes open, the optimizer's figures too, weights on the host.
STAGE_3 = {
    **STAGE_2,
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
    },
}
MACHINE = {"gpus": "3x4090", "host_ram": "256GB", "sequence": "512", "batch": "12"}


def planned(tmp_path, content, overrides=(), accelerate=None):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content, indent="\t"))
    return plan_from_files("llama-3.2-1b", list(overrides), str(file), accelerate, MACHINE)


@pytest.mark.parametrize("content", [STAGE_2, STAGE_3])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_auto_is_the_recipes_format(tmp_path, content, precision):
    open_file = planned(tmp_path, content, [f"train.precision={precision}", "strategy.engine=deepspeed"])
    assert not [f for f in open_file["findings"] if f["kind"] == "contradiction"]
    assert open_file["means"]["precision"] is None
    assert any("filled in from the recipe's train.precision" in line for line in open_file["read"])
    fixed = {"fp16": {"enabled": precision == "fp16"}, "bf16": {"enabled": precision == "bf16"}}
    said = planned(tmp_path, {**content, **fixed}, ["strategy.engine=deepspeed"])
    assert said["means"]["precision"] == precision
    assert open_file["asked"]["ledger"] == said["asked"]["ledger"]


def test_fp32_holds_twice_the_weights_of_bf16(tmp_path):
    weights = {}
    for precision in ("bf16", "fp32"):
        answer = planned(tmp_path, STAGE_2, [f"train.precision={precision}", "strategy.engine=deepspeed"])
        weights[precision] = answer["asked"]["ledger"]["weights"]
    assert weights["fp32"] == 2 * weights["bf16"]


@pytest.mark.parametrize("word", ["no", "'no'", "false"])
def test_mixed_precision_no_is_fp32(tmp_path, word):
    file = tmp_path / "acc.yaml"
    head = "distributed_type: DEEPSPEED\nnum_processes: 3\n"
    file.write_text(f"{head}mixed_precision: {word}\ndeepspeed_config: {{zero_stage: 2}}\n")
    answer = plan_from_files("llama-3.2-1b", [], None, str(file), MACHINE)
    assert answer["means"]["precision"] == "fp32"
    file.write_text(f"{head}mixed_precision: bf16\ndeepspeed_config: {{zero_stage: 2}}\n")
    lighter = plan_from_files("llama-3.2-1b", [], None, str(file), MACHINE)
    assert answer["asked"]["ledger"]["weights"] > lighter["asked"]["ledger"]["weights"] * 1.3
    # Beside a DeepSpeed file whose formats are open, accelerate's word counts.
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_2))
    file.write_text(f"{head}mixed_precision: {word}\ndeepspeed_config: {{deepspeed_config_file: ds.json}}\n")
    target = tmp_path / "written.yaml"
    both = plan_from_files("llama-3.2-1b", [], None, str(file), MACHINE, write=str(target))
    assert both["means"]["precision"] == "fp32" and yaml.safe_load(target.read_text())["mixed_precision"] == "no"


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 2},\n "zero_optimization": {"stage": 3}}',
        '{"zero_optimization": {\n "stage": 2,\n "stage": 2}}',
        '{ # a comment, as DeepSpeed takes it\n "zero_optimization": {"stage": 2,\n "stage": 3}}',
        "zero_optimization:\n  stage: 2\n  stage: 3\n",
    ],
)
def test_a_key_twice_is_refused_with_its_line(tmp_path, text):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"ds\.json, line [23]: .*(stage|zero_optimization) is given twice"):
        read_file(str(file))


def test_the_command_says_it(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 12,\n "train_batch_size": 24}')
    run = tercet("plan", "llama-3.2-1b", "--deepspeed-config", str(file), "--gpus", "3x4090")
    assert run.returncode == 2 and "line 2: train_batch_size is given twice" in run.stderr


@pytest.mark.parametrize("value", ["yes please", 7, [True]])
def test_a_format_that_is_neither_on_off_nor_open_is_refused(tmp_path, value):
    with pytest.raises(InputError, match="true, false or auto"):
        planned(tmp_path, {**STAGE_2, "fp16": {"enabled": value}})
