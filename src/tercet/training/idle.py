"""What a rank's process holds without a model: `python -m tercet.training.idle` prints its resident peak in bytes.

It differs between machines by a hundred megabytes, with the build of PyTorch and with how a system maps its libraries, so
`tercet doctor` measures it. A step of two rows has called what a step calls.
"""

from __future__ import annotations

import torch
import torch.utils.tensorboard  # what a run imports besides its own modules
from torch.nn.functional import scaled_dot_product_attention

import tercet.training.rank
import tercet.training.run  # noqa: F401
from tercet.training.loop import peak_bytes


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            x = model(torch.arange(8)).view(1, 1, 8, 8)
            loss = scaled_dot_product_attention(x, x, x, is_causal=True).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(peak_bytes(torch.device("cpu")))


if __name__ == "__main__":
    main()
