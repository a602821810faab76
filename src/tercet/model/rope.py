"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its scalings.

Two layouts of the rotated pairs exist: half-split (i, i + dim/2) as Llama's checkpoints have them, and
interleaved (2i, 2i + 1) as DeepSeek's latent attention has them. The table serves both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tercet.spec.model import Rope

Table = tuple[Tensor, Tensor]


def rotary_table(rope: Rope, dim: int, positions: Tensor, dtype: torch.dtype) -> Table:
    """Return (cos, sin) of shape (batch, tokens, 1, dim) for integer positions of shape (batch, tokens).

    Angles are fp32 whatever `dtype`: a bf16 angle is wrong from position 256 on, and published models were
    trained with fp32 ones, so a float64 model that is to equal them must have the same.
    """
    frequencies, factor = scaled_frequencies(rope, dim, positions)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def scaled_frequencies(rope: Rope, dim: int, positions: Tensor) -> tuple[Tensor, float]:
    """Return (dim / 2 angles per position in fp32, what cos and sin are multiplied with)."""
    exponent = torch.arange(0, dim, 2, device=positions.device).float() / dim
    frequencies = 1.0 / rope.theta**exponent
    kind = rope.kind
    if kind == "linear":
        return frequencies / rope.number("factor"), 1.0
    if kind == "dynamic":
        return _dynamic(rope, dim, positions, exponent), 1.0
    if kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if kind == "yarn":
        return _yarn(rope, dim, exponent), yarn_table_factor(rope)
    return frequencies, 1.0


def _dynamic(rope: Rope, dim: int, positions: Tensor, exponent: Tensor) -> Tensor:
    """Theta grows with the text once it is longer than the trained context (NTK-aware, "dynamic" in configs).

    Follows from these positions alone, so the same text gives the same numbers whatever came before.
    """
    trained, factor = rope.number("original_max_position_embeddings"), rope.number("factor")
    longest = torch.clamp(positions.amax(-1) + 1, min=trained)[:, None, None]  # of each row: rows do not meet
    theta = rope.theta * ((factor * longest / trained) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / theta**exponent


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    trained, factor = rope.number("original_max_position_embeddings"), rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    share = (trained / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    slowed = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(between, blended, slowed)


def _yarn(rope: Rope, dim: int, exponent: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), section 3.2: interpolate slow pairs, keep fast ones, ramp between."""
    trained, factor = rope.number("original_max_position_embeddings"), rope.number("factor")

    def pair_that_turns(turns: float) -> float:
        """Return the pair whose angle turns so often over the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.number("beta_fast", 32)), pair_that_turns(rope.number("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a ramp of no length would divide by zero
    pairs = torch.arange(dim // 2, device=exponent.device, dtype=torch.float32)
    interpolated = torch.clamp((pairs - first) / (last - first), 0, 1)
    wavelengths = rope.theta**exponent
    kept = 1 - interpolated
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_table_factor(rope: Rope) -> float:
    """First of YaRN's two corrections: cos and sin grow by this (1 when mscale equals mscale_all_dim)."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    one, all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    factor = rope.number("factor")
    if one and all_dim:
        return _mscale(factor, one) / _mscale(factor, all_dim)
    return _mscale(factor)


def latent_softmax_factor(rope: Rope) -> float:
    """Second correction, DeepSeek's: latent attention's scores are multiplied by mscale(mscale_all_dim) squared."""
    all_dim = rope.number("mscale_all_dim", 0)
    return _mscale(rope.number("factor"), all_dim) ** 2 if rope.kind != "default" and all_dim else 1.0


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate x of shape (batch, tokens, heads, dim) by the table; pair i is (x[i], x[i + dim/2])."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_interleaved(x: Tensor, table: Table) -> Tensor:
    """Rotate pairs (x[2i], x[2i + 1]). Returns all first members, then all second ones.

    That reordering is the same for queries and keys, so their products do not see it.
    """
    half = x.shape[-1] // 2
    cos, sin = table[0][..., :half], table[1][..., :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
