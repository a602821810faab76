"""What makes generating fast changes no number beyond rounding: products of few rows, joined matrices, prompts together."""

from __future__ import annotations

import pytest
import torch
from tests.served_tiny import save_served

from tercet.inference import batch as batches
from tercet.inference.batch import Batch
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served
from tercet.model.linear import NARROW, Linear, join, multiply


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return open_served(save_served(tmp_path_factory.mktemp("fast") / "model", context_tokens=64), "fp32")


@pytest.mark.parametrize("width", [32, NARROW])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1), (3, 1), (1, 5), (8, 1), (9, 1), (0, 1)])
def test_few_rows_are_multiplied_as_many_are(shape, width):
    weight, bias = torch.nn.Parameter(torch.randn(40, width)), torch.randn(40)
    x = torch.randn(*shape, width)
    wanted = x.double() @ weight.double().t() + bias.double()
    with torch.no_grad():
        found = multiply(x, weight, bias)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)


def test_joined_matrices_keep_their_names_and_values(served):
    """A loaded model's q, k and v are one matrix; its tensors are still those of the file, by their own names."""
    attention = served.model.model.layers["0"].self_attn
    assert attention.joined is not None and served.model.model.layers["1"].mlp.joined is not None
    own = dict(served.model.named_parameters())
    from tercet.weights.reading import load_model

    for name, wanted in load_model(served.place, "fp32").named_parameters():
        assert torch.equal(own.pop(name), wanted), name
    assert not own
    with torch.no_grad():  # one memory: what is written under a name acts
        before, x = attention.joined(torch.ones(1, 1, attention.q_proj.in_features)), attention.k_proj.weight
        x.neg_()
        after = attention.joined(torch.ones(1, 1, attention.q_proj.in_features))
        x.neg_()
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], -before[1])


def test_what_is_no_plain_matrix_is_not_joined():
    class Wrapped(Linear):
        """As an adapter or a packed format has it."""

    plain, other, biased = Linear(8, 4, bias=False), Wrapped(8, 4, bias=False), Linear(8, 4)
    assert join((plain, other)) is None and join((plain, biased)) is None


def _alone(served, prompt, tokens):
    return batches.run(Batch(served.model, 1), [prompt], tokens, Sampling(), ())[0].new


def test_short_prompts_are_computed_together_and_as_alone(served):
    prompts = [[5, 7, 9, 11, 13, 8, 6, 4], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36]]
    made = Batch(served.model, 4)
    texts = [made.add(p, 9, Sampling()) for p in prompts]
    assert made.step() == texts, "one forward for all of them"
    while any(not t.done for t in texts):
        made.step()
    assert [t.new for t in texts] == [_alone(served, p, 9) for p in prompts]


def test_filling_never_reaches_beyond_the_room(served):
    """A prompt that is nearly as long as the room, its beginning known, beside one that has as much left."""
    long = [5 + n % 40 for n in range(60)]
    prompts = [[*long[:-6], 50, 51, 52, 53, 54, 55], [60 + n for n in range(11)]]
    made = Batch(served.model, 2)
    first = made.add(long, 2, Sampling())
    while not first.done:
        made.step()
    made.remove(first)
    texts = [made.add(p, 3, Sampling()) for p in prompts]
    assert texts[0].reused == 54
    while any(not t.done for t in texts):
        made.step()
    assert [t.new for t in texts] == [_alone(served, p, 3) for p in prompts]
