"""Reading other people's configs: both styles, absent keys, and sentences for what is not built."""

from __future__ import annotations

import json

import pytest

from tercet.errors import InputError
from tercet.spec.blocks.gqa import GQA
from tercet.spec.families import describe, from_config, preset
from tercet.spec.recipe import ModelSection

LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
}


def read(config):
    family, sizes = from_config(config, "X/config.json")
    return family.build(sizes)


def test_absent_keys_mean_what_transformers_takes_them_for():
    model = read(LLAMA)
    assert model.layers[0].attention == GQA(4, 4, 8)
    assert (model.norm_eps, model.rope.theta, model.context_tokens, model.tied) == (1e-6, 10_000.0, 2048, False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope_theta": 5e5, "max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
)
def test_every_spelling_of_yarn_is_one(rope):
    model = read({**LLAMA, **rope})
    assert model.rope.theta == 5e5
    assert model.rope.kind == "yarn"
    assert dict(model.rope.scaling) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', built: 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, built: 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1]}},
            "rope_type 'longrope' is not built; known: default,",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "swing": 3}}, "keys that are not understood: swing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method is 'gptq'"),
        ({"num_attention_heads": 5}, "model.width 32 is not divisible by model.heads 5"),
    ],
)
def test_what_is_not_built_has_a_sentence(change, sentence):
    with pytest.raises(InputError) as caught:
        read({**LLAMA, **change})
    assert sentence in str(caught.value)


def test_a_missing_key_is_named():
    with pytest.raises(InputError, match=r"X/config.json: the key 'hidden_size' is missing"):
        read({k: v for k, v in LLAMA.items() if k != "hidden_size"})


def test_an_unknown_architecture_says_what_is_missing_and_what_is_strange():
    config = {
        "model_type": "gemma9",
        "vocab_size": 8,
        "hidden_size": 8,
        "final_logit_softcapping": 30.0,
        "torch_dtype": "x",
    }
    with pytest.raises(InputError) as caught:
        read(config)
    text = str(caught.value)
    assert "model_type 'gemma9' is not one that Tercet builds" in text
    assert "missing keys: num_hidden_layers, num_attention_heads, intermediate_size" in text
    assert "keys that no block here understands: final_logit_softcapping" in text
    assert "torch_dtype" not in text
    assert "Known: llama, mistral, qwen2" in text


def test_a_hub_name_that_is_known_needs_no_download():
    model = describe(ModelSection(path="deepseek-ai/DeepSeek-V2-Lite"))
    assert model.parameters == preset("deepseek-v2-lite").parameters
    with pytest.raises(InputError, match=r"neither here nor known by name\n.*tercet fetch acme/unheard-of"):
        describe(ModelSection(path="acme/unheard-of"))


def test_sizes_may_be_overridden():
    model = describe(
        ModelSection(
            preset="deepseek-v3", layers=5, dense_layers=1, experts=16, expert_groups=4, groups_per_token=2, mtp_depth=0
        )
    )
    assert len(model.layers) == 5
    assert model.layers[0].feedforward.ffn == 18_432
    assert model.layers[1].feedforward.experts == 16
    assert model.mtp == ()


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"expert_groups": 7}, "model.experts 256 is not divisible by model.expert_groups 7"),
        ({"experts_per_token": 200}, "leaves 128 experts to choose 200 from"),
        ({"rope_dim": 63}, "model.rope_dim is 63"),
        ({"family": "llama"}, "model.family is 'llama', which preset 'deepseek-v3' is not of"),
    ],
)
def test_sizes_that_cannot_work_have_sentences(sizes, sentence):
    with pytest.raises(InputError) as caught:
        describe(ModelSection(preset="deepseek-v3", **sizes))
    assert sentence in str(caught.value)


def test_a_family_without_its_sizes_lists_them():
    with pytest.raises(InputError, match=r"model.kv_rank, model.nope_dim, model.rope_dim, model.value_dim missing"):
        describe(ModelSection(family="deepseek_v3", layers=2, width=32, heads=4, ffn=44, vocabulary=67))


def test_a_recipe_may_extend_the_context():
    scaling = {"type": "yarn", "factor": "4", "original_max_position_embeddings": "32768"}
    model = describe(ModelSection(preset="qwen2.5-0.5b", context_tokens="128k", rope_scaling=scaling))
    assert model.context_tokens == 131_072
    assert dict(model.rope.scaling) == {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32_768}


def test_a_broken_config_names_its_line(tmp_path):
    (tmp_path / "config.json").write_text('{\n"model_type": "llama",\n"hidden_size" 32}')
    with pytest.raises(InputError, match=r"config.json, line 3: not valid JSON"):
        describe(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert describe(ModelSection(path=str(tmp_path))).width == 32
