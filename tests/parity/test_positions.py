"""Positions: YaRN far beyond the trained context, packed documents, windows, and decoding with a cache."""

from __future__ import annotations

import pytest
import torch

from tercet.model.decode import generate
from tercet.weights.reading import load_model
from tests.parity import families

SCALES = {"v2": {"mscale": 0.707, "mscale_all_dim": 0.707}, "v3": {"mscale": 1.0, "mscale_all_dim": 1.0}, "none": None}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("scale", list(SCALES))
def test_e19_every_position_up_to_four_times_the_context(family, scale, tmp_path, monkeypatch):
    settings = {
        **families.LATENT,
        **({"topk_method": "greedy"} if family == "deepseek_v2" else {"n_group": 1, "topk_group": 1}),
    }
    if SCALES[scale] is not None:
        settings["rope_parameters"] = {**families.YARN, **SCALES[scale]}
    monkeypatch.setitem(families.CASES, "one", (family, settings))
    theirs = families.reference("one", torch.float32)
    ours = load_model(families.save(theirs, tmp_path))
    ids = families.tokens(1, 128)
    expected, got = theirs(ids).logits[0], ours(ids)[0]
    for position in range(128):
        torch.testing.assert_close(got[position], expected[position], rtol=0, atol=1e-4)


PACKED = [
    "llama",
    "mistral-window",
    "qwen3",
    "qwen2-window",
    "deepseek_v2-lite",
    "deepseek_v3-yarn",
    "deepseek_v2-groups-bias",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = load_model(families.save(families.reference(name, torch.float32), folder))
        return made[name]

    return get


@pytest.mark.parametrize("name", PACKED)
def test_b01_packed_documents_equal_documents_alone(name, models):
    model = models(name)
    documents = [families.tokens(1, n, seed=n) for n in (13, 1, 18)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    borders = torch.tensor([0, 13, 14, 32], dtype=torch.int32)
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), positions, borders)[0]
        for document, begin, end in zip(documents, borders[:-1], borders[1:], strict=True):
            torch.testing.assert_close(packed[begin:end], model(document)[0], rtol=0, atol=1e-5)
        documents[0] = families.tokens(1, 13, seed=99)
        changed = model(torch.cat(documents, 1), positions, borders)[0]
    if name.startswith("deepseek"):  # experts' matmuls change size with the first document: rounding may follow
        torch.testing.assert_close(changed[13:], packed[13:], rtol=0, atol=1e-5)
    else:
        assert torch.equal(changed[13:], packed[13:])
    assert not torch.equal(changed[:13], packed[:13])


@pytest.mark.parametrize("name", PACKED)
def test_decoding_with_a_cache_equals_the_whole_text(name, models):
    model = models(name)
    prompt = families.tokens(1, 5)[0].tolist()
    got = generate(model, len(model.spec.layers), prompt, 12, vocabulary=families.VOCABULARY)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert got == ids[5:]
