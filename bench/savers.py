"""The table of savers: peak memory, time and loss of one training run under each, every one in a process of its own.

    python bench/savers.py [--steps 60] [--only NAME;NAME] [--output bench/savers.md]

The model is small (6 layers, width 256) with a large head (32 000 words), so that what is saved of the loss shows; the
text is this Python's own library, byte by byte. Memory is the process's peak above what it held before the model was
built. The last row is transformers.Trainer with gradient checkpointing on the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {"layers": 6, "width": 256, "heads": 4, "ffn": 704, "vocabulary": 32000, "context_tokens": 512}
TOKENS, ROWS, LR = 256, 8, 1e-3

SAVERS: dict[str, dict[str, Any]] = {
    "plain: fp32, whole logits": {"loss": "whole"},
    "loss in chunks": {},
    "recompute selective": {"recompute": "selective"},
    "recompute every-2": {"recompute": "every-2"},
    "recompute full": {"recompute": "full"},
    "inputs of blocks on the host": {"recompute": "full", "offload": {"activations": "cpu"}},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "bf16-pure": {"precision": "bf16-pure"},
    "bf16-pure, adamw-8bit, full": {"precision": "bf16-pure", "optimizer": "adamw-8bit", "recompute": "full"},
    "transformers.Trainer, checkpointing": {"trainer": True},
}


def text(steps: int):
    """Return (steps, ROWS, TOKENS) bytes of the standard library's sources."""
    import torch

    folder, wanted = Path(os.__file__).parent, steps * ROWS * TOKENS
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= wanted:
            break
    order = torch.randperm(steps * ROWS, generator=torch.Generator().manual_seed(0))
    return torch.frombuffer(found[:wanted], dtype=torch.uint8).long().view(-1, TOKENS)[order].view(steps, ROWS, TOKENS)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_engine(keys: dict[str, Any], steps: int) -> dict[str, Any]:
    import torch

    from tercet.data.loader import Batch
    from tercet.engine import EngineSetup
    from tercet.engine.native import NativeEngine
    from tercet.model import decoder
    from tercet.parallel.world import World
    from tercet.spec.families import describe
    from tercet.spec.recipe import ModelSection, OptimSection, StrategySection
    from tercet.spec.strategy import Work, resolve

    if keys.get("loss") == "whole":
        decoder.next_token_loss = whole_loss
    precision = keys.get("precision", "fp32")
    layout = {k: keys[k] for k in ("recompute", "offload") if k in keys}
    strategy = resolve(StrategySection.model_validate({"micro_batch": ROWS, **layout}), 1, Work(TOKENS, ROWS))
    optim = OptimSection(name=keys.get("optimizer", "adamw"), lr=LR)
    data, before = text(steps), peak_bytes()
    world = World(0, 1, 0, torch.device("cpu"))
    engine = NativeEngine(EngineSetup(describe(ModelSection(**SIZES)), strategy, optim, precision, world, seed=1))
    losses, seconds = [], []
    for ids in data:
        labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], 1)
        borders = torch.arange(0, ROWS * TOKENS + 1, TOKENS, dtype=torch.int32)
        positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
        begin = time.perf_counter()
        losses.append(engine.step([Batch(ids, labels, positions, borders, list(range(ROWS)))], LR).loss)
        seconds.append(time.perf_counter() - begin)
    held = engine.memory()["between_steps"]
    return {**_figures(losses, seconds, before), "held_bytes": sum(held.values())}


def whole_loss(hidden: Any, head: Any, labels: Any, *rest: Any) -> Any:
    """The loss as it is written in a textbook: all logits at once."""
    import torch.nn.functional as F

    return F.cross_entropy(F.linear(hidden, head).flatten(0, 1).float(), labels.flatten(), reduction="sum")


def run_trainer(steps: int) -> dict[str, Any]:
    import tempfile

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        num_hidden_layers=SIZES["layers"],
        hidden_size=SIZES["width"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["heads"],
        intermediate_size=SIZES["ffn"],
        vocab_size=SIZES["vocabulary"],
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    rows, before = text(steps).flatten(0, 1), peak_bytes()
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    begin = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - begin) / steps
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return _figures(losses, [seconds], before)


def _figures(losses: list[float], seconds: list[float], before: int) -> dict[str, Any]:
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "peak_bytes": peak_bytes() - before,
        "seconds": statistics.median(seconds),
        "loss": sum(tail) / len(tail),
        "first": losses[:3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", help="names of savers, separated by ;")
    parser.add_argument("--output", type=Path, help="write the table there, as Markdown, with a .json beside it")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        keys = SAVERS[options.run]
        found = run_trainer(options.steps) if keys.get("trainer") else run_engine(keys, options.steps)
        print("RESULT " + json.dumps(found))
        return
    results = {}
    for name in options.only.split(";") if options.only else SAVERS:
        command = [sys.executable, __file__, "--run", name, "--steps", str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            print(f"{name}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
            continue
        results[name] = json.loads(line.removeprefix("RESULT "))
        print(f"{name}: {results[name]}", flush=True)
    lines = table(results)
    print("\n".join(lines))
    if options.output:
        head = f"# Savers\n\n`python bench/savers.py --steps {options.steps}`; what is run: the file's head.\n\n"
        options.output.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    first = next(iter(results.values()))
    lines = [
        "| saver | peak MB | of plain | s/step | final loss | from plain |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        share, gap = r["peak_bytes"] / first["peak_bytes"], r["loss"] / first["loss"] - 1
        lines.append(
            f"| {name} | {r['peak_bytes'] / 1e6:.0f} | {share:.2f} | {r['seconds']:.2f} | {r['loss']:.4f} | {gap:+.2%} |"
        )
    return lines


if __name__ == "__main__":
    main()
