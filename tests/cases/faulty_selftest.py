"""A rank of the self-test whose all-reduce is broken unless NCCL_P2P_DISABLE is set. Run by test_e01."""

import os
import sys
import time

import torch.distributed as dist

from tercet.probe.selftest import main

FAULT = sys.argv[1]


def broken(tensor):
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return dist.all_reduce(tensor)
    if FAULT == "hang":
        time.sleep(3600)
    if FAULT == "zeros":
        return tensor.zero_()
    raise RuntimeError("transport says no")


if __name__ == "__main__":
    main(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), broken)
