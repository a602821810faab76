"""Our decoder against transformers' on the same weights: training steps in bf16 on the CPU, pairs in one run.

    python bench/model_speed.py [--pairs 9] [--threads 2] [--only dense]

Each pair runs one step of either side in turn (which one goes first alternates); printed are the median step and
the median of the pairs' ratios, which a busy machine disturbs least. Both sides take the loss as a token sum, and
gradients are dropped between steps; no optimizer. transformers runs its best: SDPA, grouped matmul for experts.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tercet.weights.reading import load_model

CASES = {
    "dense": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "deepseek": (
        "deepseek_v3",
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
VOCABULARY, ROWS, TOKENS = 8192, 8, 256


def build(case: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    kind, sizes = CASES[case]
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(folder, "bf16")
    ours.mtp_weight = 0.0
    return ours.train(), theirs.train()


def steps(case: str) -> tuple[Callable[[], float], Callable[[], float]]:
    ours, theirs = build(case)
    count = ROWS * (TOKENS - 1)
    drawn = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]

    def batch(side: int) -> torch.Tensor:
        """A new batch each step, the same on both sides: experts get other numbers of tokens every time."""
        return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=drawn[side])

    def our_step() -> float:
        ids = batch(0)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        begin = time.perf_counter()
        (ours(ids, labels=labels) / count).backward()
        for p in ours.parameters():
            p.grad = None
        return time.perf_counter() - begin

    def their_step() -> float:
        ids = batch(1)
        begin = time.perf_counter()
        theirs(ids, labels=ids, use_cache=False).loss.backward()
        for p in theirs.parameters():
            p.grad = None
        return time.perf_counter() - begin

    return our_step, their_step


def peak_growth(case: str, side: str, threads: int) -> int:
    """Return how far the peak of resident memory lies above its level before three steps, in a process of its own."""
    command = [sys.executable, __file__, "--only", case, "--memory-of", side, "--threads", str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure_memory(case: str, side: str) -> None:
    step = steps(case)[("ours", "theirs").index(side)]
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--memory-of", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        return measure_memory(arguments.only, arguments.memory_of)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.processor() or platform.machine()}, "
        f"{arguments.threads} threads; {ROWS} rows of {TOKENS} tokens, vocabulary {VOCABULARY}, bf16"
    )
    raw = {}
    for case in [arguments.only] if arguments.only else list(CASES):
        ours, theirs = steps(case)
        memory = {side: peak_growth(case, side, arguments.threads) for side in ("ours", "theirs")}
        ours(), theirs()  # the first steps allocate and choose kernels
        pairs = []
        for n in range(arguments.pairs):
            if n % 2:
                b, a = theirs(), ours()
            else:
                a, b = ours(), theirs()
            pairs.append((a, b))
        ratio = statistics.median(b / a for a, b in pairs)
        mine, yours = (statistics.median(p[k] for p in pairs) for k in (0, 1))
        raw[case] = {"pairs": pairs, "memory": memory, "ratio": ratio}
        print(
            f"{case:9} ours {mine * 1e3:7.0f} ms  transformers {yours * 1e3:7.0f} ms  {ratio:.2f}x as fast  "
            f"memory of steps: ours {memory['ours'] / 1e6:.0f} MB, transformers {memory['theirs'] / 1e6:.0f} MB"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
