"""Multi-head latent attention: keys and values come from one small latent, DeepSeek-V2, arXiv 2405.04434, section 2.1.

Twin of model/mla.py. Each head's query and key have a part without position (`nope_dim`) and a rotary part
(`rope_dim`); the rotary key is shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.blocks.cost import Kept, Matmul, matrices
from tercet.spec.model import Tensor


@dataclass(frozen=True)
class MLA:
    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # None: queries by one full matrix (V2-Lite)
    bias: bool = False  # on the projections that read or write the residual stream
    interleaved: bool = True  # rotary pairs are neighbours (0, 1), (2, 3), …; False: (0, half), (1, half + 1), …
    fp32_rotation: bool = False  # rotate in fp32 whatever the model's type (V2's code; V3's uses the model's type)
    latent_eps: float = 1e-6  # of the latents' norms: DeepSeek's code keeps this whatever rms_norm_eps says

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        q, kv = self.heads * self.query_dim, self.heads * (self.nope_dim + self.value_dim)
        found = []

        def matrix(name: str, rows: int, columns: int, axes: tuple[str, str], bias: bool = False) -> None:
            found.append(Tensor(f"{prefix}{name}.weight", (rows, columns), axes, "matrix"))
            if bias:
                found.append(Tensor(f"{prefix}{name}.bias", (rows,), axes[:1], "bias"))

        def norm(name: str, size: int, axis: str) -> None:
            found.append(Tensor(f"{prefix}{name}.weight", (size,), (axis,), "norm"))

        if self.q_rank is None:
            matrix("q_proj", q, width, ("heads", "width"))
        else:
            matrix("q_a_proj", self.q_rank, width, ("q_rank", "width"), self.bias)
            norm("q_a_layernorm", self.q_rank, "q_rank")
            matrix("q_b_proj", q, self.q_rank, ("heads", "q_rank"))
        matrix("kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, width, ("kv_rank", "width"), self.bias)
        norm("kv_a_layernorm", self.kv_rank, "kv_rank")
        matrix("kv_b_proj", kv, self.kv_rank, ("heads", "kv_rank"))
        matrix("o_proj", width, self.heads * self.value_dim, ("width", "heads"), self.bias)
        return tuple(found)

    def flops(self, width: int, tokens: int, context: float) -> int:
        """Return forward FLOPs; keys and values are expanded from the latent, as training does it."""
        matrices = sum(t.parameters for t in self.tensors("", width) if t.kind == "matrix")
        scores_and_values = 2 * tokens * context * self.heads * (self.query_dim + self.value_dim)
        return int(2 * tokens * matrices + scores_and_values)

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Return the numbers per token that scores and values have, over all heads."""
        return self.heads * self.query_dim, self.heads * self.value_dim

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return matrices(self.tensors("", width))

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """The latents before and after their norms; queries, keys, values and attention's output, all of one width.

        The fast kernels want one width, so the narrower are padded; of padded results the last matmul reads a copy.
        """
        latents = 2 * (self.q_rank or 0) + 2 * self.kv_rank + self.rope_dim
        widest = max(self.query_dim, self.value_dim)
        # A padded value is a copy; another is a view into the expanded latent, which then stays whole.
        narrow = self.value_dim < widest
        values = widest + self.value_dim if narrow else self.nope_dim + self.value_dim
        results = sum(m.outer for m in self.matmuls(width))
        return Kept(
            inputs=width,
            outputs=latents + self.heads * (3 * widest + values),
            products=0,
            stats=self.heads + (1 if self.q_rank is None else 2),
            elementwise=latents + 4 * self.heads * self.query_dim,
            selected=results + self.heads * widest,
            selected_stats=self.heads,
        )
