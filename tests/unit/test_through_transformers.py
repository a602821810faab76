"""model.module=transformers: described by the files, computed by transformers, refused where that cannot be right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.transformers_tiny import KINDS, reference, save_tiny

from tercet.errors import InputError
from tercet.model.decode import generate
from tercet.model.through_transformers import ThroughTransformers, as_built, check_documents
from tercet.planner.answer import plan, read_recipe
from tercet.spec.families import describe
from tercet.spec.families.through_transformers import in_transformers
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder

IDS = torch.randint(0, 67, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("tiny")
    return {kind: save_tiny(place / kind, kind) for kind in KINDS}


def section(folder, **keys) -> ModelSection:
    return ModelSection(path=str(folder), module="transformers", **keys)


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_and_text_are_those_of_transformers(folders, kind):
    ours, theirs = load_model(folders[kind]), reference(folders[kind])
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-6, atol=1e-6)
    expected = theirs.generate(IDS[:1, :7], max_new_tokens=6, do_sample=False)[0, 7:].tolist()
    assert generate(ours, 2, IDS[0, :7].tolist(), 6, vocabulary=67) == expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_documents_compute_as_if_alone(folders, kind):
    model = load_model(folders[kind])
    positions = torch.cat((torch.arange(7), torch.arange(1), torch.arange(8)))[None]
    packed = model(IDS[:1], positions=positions)
    alone = torch.cat([model(part) for part in IDS[:1].split((7, 1, 8), 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    labels = torch.where(torch.arange(16) % 3 == 0, -100, IDS[1:])
    loss = model(IDS[:1], positions=positions, labels=labels)
    each = torch.nn.functional.cross_entropy(alone[0], labels[0], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, each)


def test_a_module_of_our_own_family_gives_our_logits(tmp_path):
    folder = save_tiny(tmp_path, "llama")
    through = ThroughTransformers(as_built(describe(section(folder))))
    through.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    torch.testing.assert_close(through(IDS), load_model(folder)(IDS), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------- what is described


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_description_has_the_modules_tensors(folders, kind):
    model, theirs = describe(section(folders[kind])), reference(folders[kind])
    assert model.parameters == sum(p.numel() for p in theirs.parameters())
    built = as_built(model)
    assert {t.name: t.shape for t in built.tensors()} == {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    assert {t.kind for t in built.tensors() if len(t.shape) == 1} <= {"norm", "bias"}
    assert len(built.layers) == 2
    assert built.tied == (kind == "gemma2")
    assert [prefix for prefix, _ in built.blocks()] == [f"{built.prefix}{n}." for n in range(2)]


def test_what_old_files_hold_besides_parameters_is_not_read(folders, tmp_path):
    tensors = load_file(folders["gpt_neox"] / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["gpt_neox"] / "config.json").read_text())
    torch.testing.assert_close(load_model(tmp_path)(IDS), load_model(folders["gpt_neox"])(IDS))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_saved_folder_is_loaded_by_transformers(folders, tmp_path, kind):
    model = load_model(folders[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    save_folder(tmp_path, model.spec, model.named_parameters(), torch.float32, token_ids={"eos": 3})
    torch.testing.assert_close(reference(tmp_path)(IDS).logits, model(IDS), rtol=1e-6, atol=1e-6)
    assert set(load_file(tmp_path / "model.safetensors")) == set(load_file(folders[kind] / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 3


# ---------------------------------------------------------------------------------------------------- the planner


def test_plan_answers_without_torch_and_says_what_is_estimated(folders):
    code = (
        "import sys, tercet; a = tercet.plan(sys.argv[1], 'model.module=transformers', gpus='2x4090', sequence=32)\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules, len(a['strategies']) > 3, a['notes'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folders["gpt_neox"])], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("False True")
    assert "estimates for a module that is not ours" in done.stdout


def test_whether_transformers_has_an_architecture_is_read_not_imported():
    assert in_transformers("gpt_neox")
    assert not in_transformers("no_such_model")
    assert not in_transformers("GPTNeoXForCausalLM")


# ---------------------------------------------------------------------------------------------- what it refuses


def test_an_unknown_architecture_is_told_the_way(folders, tmp_path):
    with pytest.raises(InputError, match=r"layer_norm_eps.*; transformers has it: model.module=transformers trains it"):
        describe(ModelSection(path=str(folders["gpt_neox"])))
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(InputError) as caught:
        describe(ModelSection(path=str(tmp_path)))
    assert "model.module" not in str(caught.value)
    with pytest.raises(InputError, match="the installed transformers has no causal language model of model_type"):
        describe(section(tmp_path))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"layers": 3, "width": 64}, "model.layers, model.width cannot be set"),
        ({"init": "random"}, "model.init=random is not built for model.module=transformers"),
        ({"path": None}, "needs a model.path"),
        ({"path": None, "preset": "first-light"}, "needs a model.path"),
        ({"path": "acme/unheard-of"}, "tercet fetch acme/unheard-of"),
    ],
)
def test_sections_that_it_cannot_be(folders, keys, sentence):
    with pytest.raises(InputError) as caught:
        describe(ModelSection(**{"path": str(folders["gpt_neox"]), "module": "transformers", **keys}))
    assert sentence in str(caught.value)


def test_a_gguf_file_and_a_folder_without_weights(folders, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="reads Hugging Face folders, not GGUF files"):
        describe(section(tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text((folders["gpt_neox"] / "config.json").read_text())
    with pytest.raises(InputError, match=r"has no model.safetensors.*\n.*from_config"):
        describe(section(tmp_path))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("strategy.engine=deepspeed", "strategy.engine: deepspeed is not built for model.module=transformers"),
        ("strategy.compile=true", "strategy.compile: true is not built for model.module=transformers"),
        ("strategy.recompute=selective", "strategy.recompute: selective is not built for model.module=transformers"),
        ("strategy.tensor=2", "strategy.tensor is 2, which is not built yet"),
    ],
)
def test_strategies_that_are_not_built_for_it(folders, override, sentence):
    answer = plan(folders["gpt_neox"], ["model.module=transformers", override], gpus="2x4090", sequence=32)
    assert answer["strategies"] == []
    assert any(sentence in why for refusal in answer["refused"] for why in refusal["why"])


def test_a_sequence_beyond_its_context_names_no_key_that_would_not_help(folders):
    answer = plan(folders["gpt_neox"], ["model.module=transformers"], gpus="1x4090", sequence=128)
    why = [why for refusal in answer["refused"] for why in refusal["why"]]
    assert any("exceeds the model's context of 64 tokens" in w for w in why)
    assert not any("model.context_tokens" in w for w in why)
    recipe, _ = read_recipe(str(folders["gpt_neox"]), ["model.module=transformers"], None, None, None)
    assert recipe.data.sequence_tokens == 64


@pytest.mark.parametrize(
    ("kind", "sizes", "sentence"),
    [
        ("bert", {"is_decoder": False}, "documents in a packed row see one another, or later tokens"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "takes no positions"),
        (
            "mixtral",
            {"num_local_experts": 4, "num_key_value_heads": 2},
            r"other tensors than the files.*block_sparse_moe",
        ),
    ],
)
def test_modules_that_would_train_wrongly(tmp_path, kind, sizes, sentence):
    folder = save_tiny(tmp_path, kind, **sizes)

    def load_and_check() -> None:
        model = load_model(folder)
        check_documents(model, model.spec, torch.device("cpu"))

    with pytest.raises(InputError, match=sentence):
        load_and_check()
