"""G33: a folder that exists is that folder, whatever it lacks; what is missing is named with the cure."""

from __future__ import annotations

import base64

import pytest
import torch

from tercet.data.tokenizer import load
from tercet.errors import InputError
from tercet.spec.recipe import ModelSection
from tercet.weights import hub
from tercet.weights.reading import load_model
from tests.parity.families import reference, save


def test_a_folder_with_bin_files_asks_no_hub(tmp_path, monkeypatch):
    place = save(reference("llama", torch.float32), tmp_path / "m" / "bin")
    torch.save({"a": torch.ones(1)}, place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda *a, **k: pytest.fail("a hub was asked"))
    hub.ensure_here(ModelSection(path="m/bin"))  # has the form of a hub name
    with pytest.raises(InputError, match=r"m/bin has no model.safetensors.*\n.*pytorch_model.bin.*--import-bin"):
        load_model("m/bin")


def test_a_table_of_tiktoken_is_named_with_the_cure(tmp_path):
    lines = [f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(256)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(InputError, match=r"tokenizer.model is a table of tiktoken.*\n.*tokenizer.json"):
            load(place)
