"""Logits and gradients equal transformers' for every family, from its folders and back."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder
from tests.parity import families

BOUNDS = {"fp64": (torch.float64, 1e-6), "fp32": (torch.float32, 1e-5)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function: case -> (fp64 reference, its folder), each made once."""
    made = {}

    def get(name):
        if name not in made:
            model = families.reference(name, torch.float64)
            made[name] = model, families.save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("name", list(families.CASES))
def test_logits_and_gradients(name, precision, folders):
    dtype, bound = BOUNDS[precision]
    theirs, folder = folders(name)
    theirs = copy.deepcopy(theirs).to(dtype)
    ours = load_model(folder, dtype=precision)
    ids = families.tokens()
    families.assert_close(ours(ids), theirs(ids).logits, bound, "logits")

    labels = ids[:, 1:]
    expected = families.gradients(
        theirs, lambda: F.cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    )
    padded = F.pad(labels, (0, 1), value=-100)
    got = families.gradients(ours, lambda: ours(ids, labels=padded))  # in evaluation mode: the main loss alone
    assert set(got) == set(expected)
    for tensor in expected:
        families.assert_close(got[tensor], expected[tensor], bound, tensor)


@pytest.mark.parametrize("name", list(families.CASES))
def test_saved_by_us_loaded_by_transformers(name, folders, tmp_path):
    theirs, folder = folders(name)
    ours = load_model(folder, dtype="fp64")
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    save_folder(tmp_path, ours.spec, state.items(), torch.float64)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float64,
        experts_implementation="eager",
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ids = families.tokens()
    families.assert_close(again(ids).logits, theirs(ids).logits, 1e-12, "logits")


@pytest.mark.parametrize("name", list(families.CASES))
def test_hub_style_config(name, folders, tmp_path):
    """The same folder with rope_theta and rope_scaling, as hub repositories carry them, gives the same model."""
    _, folder = folders(name)
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = families.tokens()
    assert torch.equal(load_model(tmp_path)(ids), load_model(folder)(ids))
