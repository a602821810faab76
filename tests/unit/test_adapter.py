"""Adapters as they are described and built: what targets match, what is refused, nf4 as bitsandbytes has it."""

from __future__ import annotations

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import save_file
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import tiny_model

from tercet.errors import InputError
from tercet.model.adapter import adapt, adapter_start
from tercet.model.build import fill_parameters, make_buffers
from tercet.model.decoder import Decoder, initial_tensor
from tercet.model.linear import weight_of
from tercet.model.quantized import NF4Linear
from tercet.spec.adapter import Adapter, describe_adapter, nf4_bytes, with_adapter
from tercet.spec.families import preset
from tercet.spec.model import Tensor
from tercet.spec.recipe import build_recipe
from tercet.spec.trained import trained_model, with_frozen
from tercet.weights.reading import load_model, open_weights
from tercet.weights.writing import save_folder

LORA = Adapter(rank=4, alpha=8.0)


def adapted_names(model) -> set[str]:
    return {t.name.removesuffix(".lora_A.weight") for t in model.tensors() if t.name.endswith(".lora_A.weight")}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj",), {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (("mlp.up_proj",), {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}),
        (("model.layers.1.*.[kv]_proj",), {"model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"}),
        (("model.layers.0.self_attn.o_proj",), {"model.layers.0.self_attn.o_proj"}),
    ],
)
def test_targets_are_ends_or_patterns_of_names(targets, expected):
    assert adapted_names(with_adapter(tiny_model(), replace(LORA, targets=targets))) == expected


def test_all_linear_is_every_matrix_but_experts_router_and_head():
    model = with_adapter(tiny_deepseek(), LORA)
    names = adapted_names(model)
    assert any("shared_experts.down_proj" in name for name in names) and any("kv_b_proj" in name for name in names)
    assert not any(".experts.gate_up" in n or n.endswith((".gate", "lm_head", "embed_tokens")) for n in names)
    assert not model.mtp and model.balance.bias_speed == 0
    said = "\n".join(describe_adapter(model))
    assert "experts and router stay as they are" in said and "kv_b_proj (2)" in said


@pytest.mark.parametrize(
    ("model", "target", "says"),
    [
        (tiny_model, "q_prj", r"'q_prj' matches no matrix of this model; did you mean q_proj"),
        (tiny_model, "model.layers.7.*", r"There are: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        (tiny_model, "lm_head", r"the head get no adapters"),
        (tiny_deepseek, "experts", r"experts get no adapters here"),
        (tiny_deepseek, "mlp.gate", r"the router get no adapters"),
        (tiny_deepseek, "gate_up_proj", r"experts get no adapters here"),
    ],
)
def test_a_target_that_matches_nothing_names_what_is_there(model, target, says):
    with pytest.raises(InputError) as refused:
        with_adapter(model(), replace(LORA, targets=("o_proj", target)))
    import re

    assert re.search(says, str(refused.value)), str(refused.value)


def test_other_patterns_that_match_nothing():
    with pytest.raises(InputError, match="modules_to_save: 'lm_haed' matches nothing"):
        with_adapter(tiny_model(), replace(LORA, modules_to_save=("lm_haed",)))
    with pytest.raises(InputError, match="its embedding"):
        with_adapter(tiny_model(tied=True), replace(LORA, modules_to_save=("embed_tokens",)))
    with pytest.raises(InputError, match="freeze: 'embed' matches no tensor"):
        with_frozen(tiny_model(), ("embed",))
    with pytest.raises(InputError, match="leaves nothing to train"):
        with_frozen(tiny_model(), ("*",))
    with pytest.raises(InputError, match="stacked experts"):
        with_adapter(tiny_deepseek(), replace(LORA, quantize="nf4"))


def test_a_recipe_freezes_by_pattern():
    tree = {"model": {"preset": "first-light"}, "data": {"train": "-"}}
    model = trained_model(
        build_recipe(tree, ["train.freeze=[embed_tokens, '*.input_layernorm', model.layers.0.mlp.*]"])
    )
    frozen = {t.name for t in model.tensors() if not model.trains(t)}
    layers = len(model.layers)
    assert len(frozen) == 1 + layers + 3 and "model.layers.0.mlp.up_proj.weight" in frozen
    assert trained_model(build_recipe(tree, ["train.freeze=embed_tokens"])).freeze == ("embed_tokens",)


def test_the_seven_billion_in_nf4():
    """QLoRA's arithmetic: 4 bits and 0.127 bits of scales a parameter (arXiv 2305.14314, section 3)."""
    model = with_adapter(preset("llama-3.1-8b"), replace(LORA, quantize="nf4"))
    (matrix,) = [t for t in model.tensors() if t.name == "model.layers.0.mlp.up_proj.weight"]
    row, scales = nf4_bytes(matrix)
    assert 8 * (row * matrix.shape[0] + scales) / matrix.parameters == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("shape", [(48, 64), (33, 20), (7, 260)])
def test_nf4_is_bitsandbytes_own(shape):
    """The same numbers as its Linear4bit with double quantisation: weight, product and gradient."""
    import bitsandbytes as bnb

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = bnb.nn.Linear4bit(
        shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=True, compute_dtype=torch.float32
    )
    theirs.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    theirs = theirs.to("cpu")
    theirs.weight = theirs.weight if theirs.weight.bnb_quantized else theirs.weight.to("cpu")
    ours = NF4Linear(shape[1], shape[0], bias=False)
    ours.weight = torch.nn.Parameter(ours.pack(weight), requires_grad=False)
    wanted = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    )
    assert torch.equal(ours.unpacked(torch.float32), wanted)
    held = ours.weight.nbytes + sum(b.nbytes for b in ours.buffers())
    row, scales = nf4_bytes(Tensor("x.weight", shape, ("a", "b"), "matrix"))
    assert held == row * shape[0] + scales
    x, y = (torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    ours(x).square().sum().backward()
    torch.nn.functional.linear(y, wanted).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert (wanted - weight).abs().max() < 0.4, "near the weight"


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 4), (True, 8 / 4**0.5)])
def test_a_cached_token_sees_the_adapter_too(rslora, scale):
    """Latent attention multiplies with kv_b_proj's weight itself when one token is added: adapters count there.

    rsLoRA (arXiv 2312.03732) divides alpha by the root of the rank: so it is printed, and so it counts.
    """
    model = with_adapter(tiny_deepseek(), replace(LORA, targets=("kv_b_proj",), rslora=rslora))
    assert f"LoRA of rank 4, scale {scale:g};" in describe_adapter(model)[0]
    with torch.device("meta"):
        module = Decoder(model)
    adapt(module, model)
    kinds = {t.name: t for t in model.tensors()}

    def value_of(name: str) -> torch.Tensor:
        from tercet.model.adapter import plain_name

        t = kinds[plain_name(name)]
        start = initial_tensor(t.name, t.shape, t.kind, model, 3)
        return start if ".lora_B." not in t.name else torch.randn(t.shape, generator=torch.Generator().manual_seed(5))

    for prefix, layer in module.blocks():
        fill_parameters(layer, prefix, value_of)
    fill_parameters(module, "", value_of)
    make_buffers(module)
    module.eval()
    wrapped = module.model.layers["0"].self_attn.kv_b_proj
    product = wrapped.lora_B["default"].weight @ wrapped.lora_A["default"].weight * scale
    torch.testing.assert_close(weight_of(wrapped), wrapped.base_layer.weight + product)
    assert product.abs().max() > 0.01


def test_adapters_start_as_pefts_do():
    """A as torch starts a linear layer's weight (kaiming_uniform_ with a = root of 5), B with zeros."""
    chance = torch.Generator().manual_seed(3)
    found = adapter_start("x.lora_A.weight", (8, 500), chance)
    theirs = torch.nn.init.kaiming_uniform_(torch.empty(8, 500), a=5**0.5, generator=torch.Generator().manual_seed(4))
    assert found.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.01)
    assert found.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert not adapter_start("x.lora_B.weight", (500, 8), chance).any()


@pytest.mark.parametrize("rslora", [False, True, None])
def test_what_is_merged_has_the_papers_scale(tmp_path, rslora):
    """W + alpha / r B A (arXiv 2106.09685), with alpha / root of r for rsLoRA; a config may leave the word out."""
    spec, base, place = tiny_model(), tmp_path / "base", tmp_path / "adapter"
    name, other = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    tensors = {
        t.name: torch.randn(t.shape, generator=torch.Generator().manual_seed(n)) for n, t in enumerate(spec.tensors())
    }
    save_folder(base, spec, tensors.items(), torch.float32)
    a, b = torch.randn(9, 32), torch.randn(32, 9)
    place.mkdir()
    module = "base_model.model." + name.removesuffix(".weight")
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 9, "lora_alpha": 18, "base_model_name_or_path": str(base), "bias": "none"}
    config |= {} if rslora is None else {"use_rslora": rslora}
    (place / "adapter_config.json").write_text(json.dumps(config))
    merged = open_weights(place, spec)
    expected = tensors[name] + (18 / 3 if rslora else 18 / 9) * b @ a
    torch.testing.assert_close(merged.tensor(name), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.rows(name, 5, 11), expected[5:11], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(merged)[name], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.tensor(other), tensors[other])


@pytest.mark.parametrize("table", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_table_that_peft_trained_apart_is_not_tied_in_silence(tmp_path, table):
    """peft changes one of embedding and head and leaves the other; a model with one table for both cannot hold that."""
    spec = tiny_model(tied=True)
    save_folder(tmp_path / "base", spec, random_tensors(spec).items(), torch.float32)
    peft.LoraConfig(
        base_model_name_or_path=str(tmp_path / "base"), task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]
    ).save_pretrained(tmp_path / "adapter")
    save_file(
        {f"base_model.model.{table}": torch.zeros(spec.vocabulary, spec.width)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="one table for both"):
        load_model(tmp_path / "adapter")
