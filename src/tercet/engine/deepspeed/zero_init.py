"""DeepSpeed's zero.Init, in the format it is asked for."""

from __future__ import annotations

from typing import Any

import torch


def zero_init(ds: Any, dtype: torch.dtype, **how: Any) -> Any:
    """Shard a module as `ds.zero.Init(dtype=dtype, **how)` is meant to.

    DeepSpeed 0.19.8 (runtime/zero/partition_parameters.py) reads `dtype or torch.float16 if fp16_supported else
    torch.bfloat16`, which drops the given format on a processor without fp16: weights in files were bf16 there.
    """

    class Init(ds.zero.Init):
        def _set_dtype(self, ds_config: Any, dtype: torch.dtype) -> None:
            self.dtype = dtype

    return Init(dtype=dtype, **how)
