"""--quantize: the matrices become smaller, what they compute stays near, and what that changes is measured and said."""

from __future__ import annotations

import json

import pytest
import torch
from tests.served_tiny import save_served
from typer.testing import CliRunner

from tercet.cli import app
from tercet.errors import InputError
from tercet.inference.batch import Batch, run
from tercet.inference.quantize import Int8Linear, quantize
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served
from tercet.weights.reading import load_model

SIZES = {"width": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served(tmp_path_factory.mktemp("q") / "tiny", **SIZES)


def need_bitsandbytes(kind):
    if kind == "int4":
        pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_rounded_to_a_127th_of_its_largest(dtype):
    linear = torch.nn.Linear(96, 64, dtype=dtype)
    small = Int8Linear(linear)
    error = (small.weight.float() * small.scale.float()[:, None] - linear.weight.float()).abs()
    assert (
        error <= linear.weight.float().abs().amax(1, keepdim=True) / 127 * (0.51 if dtype == torch.float32 else 1)
    ).all()
    x = torch.randn(2, 3, 96, dtype=dtype)
    expected = x.double() @ (small.weight.double() * small.scale.double()[:, None]).T + linear.bias.double()
    assert torch.allclose(small(x).double(), expected, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("width", [8, 40, 44, 100])
def test_widths_that_pytorchs_kernel_cannot_read_are_computed_all_the_same(width):
    """That kernel ended the process (SIGSEGV) for rows that 16 does not divide."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(width, 24, bias=False).bfloat16()
    x = torch.randn(5, width).bfloat16()
    wanted = linear(x).float()
    assert (Int8Linear(linear)(x).float() - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize(("kind", "bits", "bound"), [("int8", 8, 0.05), ("int4", 4, 0.5)])
def test_it_says_what_it_changed(kind, bits, bound, folder):
    need_bitsandbytes(kind)
    whole, small = load_model(folder, "fp32"), load_model(folder, "fp32")
    found = quantize(small, kind, 320)
    ids = torch.arange(32)[None] * 7919 % 320
    with torch.no_grad():
        a, b = (model(ids)[0, :, :320] for model in (whole, small))
    assert found.difference == pytest.approx(((a - b).abs().max() / a.abs().max()).item(), rel=1e-5)
    assert found.same == pytest.approx((a.argmax(-1) == b.argmax(-1)).float().mean().item())
    assert 0 < found.difference < bound
    matrices = sum(p.numel() for n, p in whole.named_parameters() if "proj" in n)
    assert found.bytes_before - found.bytes_after == pytest.approx(matrices * (4 - bits / 8), rel=0.05)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_generating_batched_and_alone_with_small_weights(kind, folder):
    need_bitsandbytes(kind)
    said = []
    served = open_served(folder, quantized=kind, say=said.append)
    assert said and kind in said[0] and "%" in said[0]
    prompts = [served.prompt_ids(t) for t in ("the for", "is used to")]
    alone = [run(Batch(served.model, 1), [p], 8, Sampling(), ())[0].new for p in prompts]
    assert [t.new for t in run(Batch(served.model, 2), prompts, 8, Sampling(), ())] == alone


def test_the_command_line(folder):
    done = CliRunner().invoke(
        app, ["generate", str(folder), "the for", "--quantize", "int8", "--json", "--tokens", "4"]
    )
    assert done.exit_code == 0 and len(json.loads(done.stdout)["tokens"]) <= 4
    assert "int8: weights" in done.stderr


def test_what_would_gain_too_little_is_refused(tmp_path):
    sizes = {"experts": 4, "experts_per_token": 2, "expert_ffn": 256, "normalize_experts": True}
    source = save_served(tmp_path / "moe", family="qwen3_moe", head_dim=8, **sizes)
    with pytest.raises(InputError, match="experts and embeddings keep their format"):
        open_served(source, quantized="int8")
