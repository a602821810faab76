"""Traces one step's memory under fake tensors and a fake group of three ranks; prints bytes as JSON.

python tests/unit/memory_tracker.py PRESET ZERO MICRO_BATCH TOKENS RECOMPUTE
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tercet.model import decoder
from tercet.model.objective import _LinearCrossEntropy
from tercet.parallel.recompute import recompute
from tercet.spec.families import preset

RANKS = 3


def main(name: str, zero: int, micro: int, tokens: int, level: str) -> None:
    # Which labels are trained is a question about values, and fake tensors have none.
    decoder.next_token_loss = lambda h, w, y, *_: _LinearCrossEntropy.apply(h.flatten(0, 1), w, y.flatten(), True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": zero == 3}
    with FakeTensorMode():
        model = decoder.Decoder(preset(name))
        for layer in model.model.layers.values():
            recompute(layer, level)
            fully_shard(layer, **options)
        fully_shard(model, **options)
        ids = torch.zeros(micro, tokens, dtype=torch.long)
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((ids,))
        with tracker:
            model(ids, labels=ids).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    print(json.dumps({str(k).rpartition(".")[2]: v for k, v in peak.items()}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
