"""For every preset: names and shapes of the module, built on meta, equal the description's, in order."""

from __future__ import annotations

import pytest
import torch

from tercet.model.decoder import Decoder
from tercet.spec.families import describe, presets
from tercet.spec.recipe import ModelSection


@pytest.mark.parametrize("name", presets())
def test_module_equals_description(name):
    spec = describe(ModelSection(preset=name))
    with torch.device("meta"):
        module = Decoder(spec)
    built = [(n, tuple(p.shape)) for n, p in module.named_parameters()]
    assert built == [(t.name, t.shape) for t in spec.tensors()]
    assert sum(p.numel() for p in module.parameters()) == spec.parameters
