"""make gpu-check: trains small models under every strategy on the cards found, and writes a page to send back.

Per strategy: the losses against one CPU process (within bf16's rounding), the memory that ranks hold against the
ledger, the speed against the plan. Stops starting new parts after nine minutes. On a machine without a GPU it says
so and leaves; `--rehearse` then runs the same parts on CPU processes, to try this script itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tercet.engine.deepspeed.async_io import why_not_here
from tercet.report.compare import compare
from tercet.spec.machine import detect_gpus
from tercet.units import show_bytes

LIMIT_SECONDS = 540
LOSS_BOUND = 0.02  # relative; bf16 keeps eight bits, and ten steps let differences grow
RECIPE: dict[str, Any] = {
    "model": {
        "layers": "4",
        "width": "512",
        "heads": "8",
        "kv_heads": "4",
        "ffn": "1408",
        "vocabulary": "4096",
        "context_tokens": "512",
    },
    "data": {
        "train": [{"path": "package:pydoc_data/topics.py", "format": "python"}],
        "sequence_tokens": "512",
        "tokenizer": "train",
        "long_rows": "split",
    },
    "train": {"batch_sequences": "24", "steps": "12", "precision": "bf16"},
    "optim": {"lr": "5e-4", "schedule": "constant"},
}

REHEARSED = {"width": "256", "heads": "4", "kv_heads": "4", "ffn": "704", "context_tokens": "128"}  # minutes on a CPU


def run(folder: Path, name: str, ranks: int, *keys: str, cpu: bool = False) -> dict[str, Any]:
    """Return {"losses", "summary", "plan"} of one run, or {"error"}."""
    environment = dict(os.environ)
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        "-m",
        "tercet",
        "train",
        str(folder / "check.yaml"),
        *keys,
        "--ranks",
        str(ranks),
        "--output",
        str(folder / name),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:]}
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    return {
        "losses": {
            str(row["step"]): row["loss"] for row in events if row["event"] == "step"
        },  # skipped steps have none
        "summary": json.loads((folder / name / "summary.json").read_text()),
        "plan": json.loads((folder / name / "plan.json").read_text()),
    }


def parts(cards: int) -> list[tuple[str, int, tuple[str, ...]]]:
    found: list[tuple[str, int, tuple[str, ...]]] = [("single", 1, ("strategy=single",))]
    found.append(("single, recompute full", 1, ("strategy=single", "strategy.recompute=full")))
    found.append(("single, fp32", 1, ("strategy=single", "train.precision=fp32")))
    if cards > 1:
        found += [(word, cards, (f"strategy={word}",)) for word in ("ddp", "zero1", "zero2", "zero3")]
        found.append(("zero3, accumulation", cards, ("strategy=zero3", "strategy.micro_batch=1")))
    return found


def deepspeed_parts(ranks: int, on_cards: bool) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return DeepSpeed's parts: its stages, offload to the host, fp16 on cards, files where its library is built."""
    if importlib.util.find_spec("deepspeed") is None:
        return []
    stages = {
        "zero0, fp32": ("strategy.zero=0", "train.precision=fp32"),
        "zero2": ("strategy.zero=2",),
        "zero3": ("strategy.zero=3",),
        "zero2, optimizer on host": ("strategy.zero=2", "strategy.offload.optimizer=cpu"),
        "zero3, all on host": ("strategy.zero=3", "strategy.offload.optimizer=cpu", "strategy.offload.weights=cpu"),
    }
    if on_cards:  # DeepSpeed has no fp16 on a CPU
        stages["zero2, fp16"] = ("strategy.zero=2", "train.precision=fp16")
    if not why_not_here():
        stages["zero3, all in files"] = (
            "strategy.zero=3",
            "strategy.offload.optimizer=nvme",
            "strategy.offload.weights=nvme",
        )
    return [(f"deepspeed {name}", ranks, ("strategy.engine=deepspeed", *keys)) for name, keys in stages.items()]


def distance(losses: dict[str, float], reference: dict[str, float]) -> float:
    """Return how far a loss is from the reference's, up to the first step that fp16's loss scale skipped."""
    until = next((step for step in reference if step not in losses), None)
    compared = [step for step in reference if until is None or int(step) < int(until)]
    return max((abs(losses[s] - reference[s]) / reference[s] for s in compared), default=0.0)


def versions(cards: list[dict[str, str]]) -> dict[str, str]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "driver": cards[0].get("driver_version", "unknown") if cards else "none",
        "system": platform.platform(),
        "cards": ", ".join(card["name"] for card in cards) or "none",
    }


def page(found: dict[str, dict[str, Any]], about: dict[str, str], seconds: float) -> str:
    lines = [
        f"# {about['cards']}",
        "",
        f"Written by `make gpu-check` in {seconds:.0f} s.",
        "",
        "| what | version |",
        "|---|---|",
    ]
    lines += [f"| {k} | {v} |" for k, v in about.items()]
    lines += [
        "",
        "| strategy | ranks | last loss | furthest from one CPU process | tokens/s | planned | peak per rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in found.items():
        if "error" in part:
            lines.append(f"| {name} | {part.get('ranks', '')} | failed: {part['error'].splitlines()[-1]} | | | | |")
            continue
        summary, planned = part["summary"], part["plan"].get("tokens_per_second")
        lines.append(
            f"| {name} | {summary['ranks']} | {list(part['losses'].values())[-1]:.4f} | {part['distance']:.2%}"
            f"{'' if part['distance'] <= LOSS_BOUND else ' (too far)'} | {summary['tokens_per_second']:.0f} | "
            f"{f'{planned:.0f}' if planned else 'unknown'} | {show_bytes(max(summary['peak_bytes_per_rank']))} |"
        )
    for name, part in found.items():
        if "error" not in part:
            lines += [
                "",
                f"## {name}: predicted beside measured",
                "",
                "| what | predicted | measured |",
                "|---|---|---|",
            ]
            lines += [
                f"| {r['what']} ({r['group']}) | {r['predicted']} | {r['measured']} |"
                for r in compare(part["plan"], part["summary"])
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="run the parts on three CPU processes")
    parser.add_argument("--only", default="", help="parts whose name has this word, such as deepspeed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    cards = detect_gpus()
    if not cards and not options.rehearse:
        print("no GPU found (nvidia-smi names none): there is nothing to check here")
        return
    begin = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = (
            RECIPE
            if cards
            else RECIPE | {"model": RECIPE["model"] | REHEARSED, "data": RECIPE["data"] | {"sequence_tokens": "128"}}
        )
        (folder / "check.yaml").write_text(json.dumps(recipe))
        references = {
            p: run(folder, f"cpu-{p}", 1, "strategy=single", f"train.precision={p}", cpu=True) for p in ("bf16", "fp32")
        }
        if failed := [r["error"] for r in references.values() if "error" in r]:
            sys.exit(f"the CPU reference failed: {failed[0]}")
        every = [
            p for p in parts(len(cards) or 3) + deepspeed_parts(len(cards) or 3, bool(cards)) if options.only in p[0]
        ]
        for number, (what, ranks, keys) in enumerate(every):
            if time.monotonic() - begin > LIMIT_SECONDS:
                print(f"out of time; left out: {what} and what follows")
                break
            print(f"{what} …", flush=True)
            part = run(folder, f"part-{number}", ranks, *keys, cpu=not cards)
            reference = references["fp32" if "fp32" in what else "bf16"]["losses"]
            if "error" not in part:
                part["distance"] = distance(part["losses"], reference)
            found[what] = part | {"ranks": ranks}
    about = versions(cards)
    label = re.sub(r"[^a-z0-9]+", "-", f"{len(cards)}x {cards[0]['name']}".lower()) if cards else "cpu-rehearsal"
    text = page(found, about, time.monotonic() - begin)
    (options.output / f"{label}.md").write_text(text, encoding="utf-8")
    (options.output / f"{label}.json").write_text(
        json.dumps({"versions": about, "parts": found}, indent=1), encoding="utf-8"
    )
    print(text)
    print(f"written: {options.output / label}.md and .json; please send both back")
    if any("error" in part or part["distance"] > LOSS_BOUND for part in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
