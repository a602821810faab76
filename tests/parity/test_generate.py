"""Greedy text equals transformers' `generate`, token for token: alone and batched with unequal lengths, with a cache
and without; latent attention is computed there in its absorbed form."""

from __future__ import annotations

import pytest
import torch

from tercet.inference.batch import Batch, run
from tercet.inference.sampling import Sampling
from tercet.weights.reading import load_model
from tests.parity import families

NEW, CAPACITY = 10, 64
FAST = ("llama-wide-heads", "qwen2-window", "qwen3_moe", "deepseek_v2-lite", "deepseek_v3-odd", "llama-dynamic")
PROMPTS = [families.tokens(1, n, seed=n)[0].tolist() for n in (23, 1, 9)]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another cost more than these small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def theirs(model, prompt, cached=True):
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "use_cache": cached, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    out = model.generate(ids, max_new_tokens=NEW, **how)
    return out[0, len(prompt) :].tolist()


def without_cache(model, prompt):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in families.CASES])
def test_greedy_text_is_theirs(name, tmp_path):
    reference = families.reference(name, torch.float64)
    ours = load_model(families.save(reference, tmp_path), "fp64").eval()
    expected = [theirs(reference, prompt) for prompt in PROMPTS]
    assert len({tuple(e) for e in expected}) > 1
    alone = [run(Batch(ours, 1, CAPACITY), [p], NEW, Sampling(), ())[0].new for p in PROMPTS]
    assert alone == expected
    # Two rows for three texts: they join and leave while others are in their middle.
    batched = run(Batch(ours, 2, CAPACITY), PROMPTS, NEW, Sampling(), ())
    assert [t.new for t in batched] == expected
    assert without_cache(ours, PROMPTS[0]) == theirs(reference, PROMPTS[0], cached=False)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3-yarn"])
def test_a_prompt_in_pieces_and_a_shared_beginning_change_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tercet.inference.batch.PIECE_TOKENS", 7)
    model = load_model(families.save(families.reference(name, torch.float64), tmp_path), "fp64").eval()
    start = families.tokens(1, 40, seed=5)[0].tolist()
    prompts = [[*start, 5, 6], [*start, 7], start[:30], [*start, 5, 6, 8]]
    expected = [without_cache(model, p) for p in prompts]
    batch = Batch(model, 2, CAPACITY)
    texts = [run(batch, [p], NEW, Sampling(), ())[0] for p in prompts]
    assert [t.new for t in texts] == expected
    assert [t.reused for t in texts] == [0, 40, 29, 42]


def test_a_text_does_not_depend_on_its_neighbours_and_seeds_repeat_it(tmp_path):
    model = load_model(families.save(families.reference("llama", torch.float64), tmp_path), "fp64").eval()
    how = Sampling(temperature=1.3, top_k=40, top_p=0.95, seed=11)
    alone = [run(Batch(model, 1, CAPACITY), [p], NEW, how, ())[0].new for p in PROMPTS]
    assert [t.new for t in run(Batch(model, 3, CAPACITY), PROMPTS, NEW, how, ())] == alone
    other = Sampling(temperature=1.3, top_k=40, top_p=0.95, seed=12)
    assert run(Batch(model, 1, CAPACITY), [PROMPTS[0]], NEW, other, ())[0].new != alone[0]
