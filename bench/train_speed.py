"""Training speed and memory, side by side in one run: Tercet, the first document's way, transformers.Trainer.

Same model (Llama shapes, 17 M parameters), same text (the language reference in every CPython), same tokenizer, same
number of rows per step; one process each, alternating, medians. What differs is what each does with its rows:

* document: every row padded to 512, plain AdamW, fp32, a loop over transformers' model (its masked-LM collator
  replaced by next-token labels, which is the least that makes it a causal model);
* trainer: transformers.Trainer at its best here: bf16, fused AdamW, rows packed to 512 with no padding at all;
* tercet: `tercet train`, bf16, rows packed to 512 with documents kept apart.

    python bench/train_speed.py [--runs 3] [--steps 12] [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LENGTH, ROWS, WARM_UP = 512, 8, 3
SIZES = {"layers": 6, "width": 384, "heads": 6, "kv_heads": 6, "ffn": 1024, "vocabulary": 8192}
CONTENDERS = ("tercet", "trainer", "document")


def texts() -> list[str]:
    """Return the paragraphs of the language reference: about 90 tokens each, as in many instruction sets."""
    source = Path(find_spec("pydoc_data").submodule_search_locations[0], "topics.py").read_text(encoding="utf-8")
    topics = ast.literal_eval(next(n.value for n in ast.parse(source).body if isinstance(n, ast.Assign)))
    return [p.strip() for text in topics.values() for p in text.split("\n\n") if len(p.strip()) > 200]


def prepare(folder: Path) -> None:
    """Write the text and a tokenizer that all three use."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    rows = texts()
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for text in rows:
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        rows, vocab_size=SIZES["vocabulary"] - 1, special_tokens=["<end>"], show_progress=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(str(folder / "tokenizer"))


# ---------------------------------------------------------------------------------------------- the contenders


def run_tercet(folder: Path, steps: int, run: int) -> dict[str, Any]:
    """Start `tercet train` with an empty cache, as on the first day."""
    output = folder / f"tercet-{run}"
    recipe = {
        "model": {k: str(v) for k, v in SIZES.items()} | {"context_tokens": str(LENGTH)},
        "data": {
            "train": str(folder / "text.jsonl"),
            "sequence_tokens": str(LENGTH),
            "tokenizer": str(folder / "tokenizer"),
            "cache": str(folder / f"cache-{run}"),
            "long_rows": "split",
        },
        "strategy": {"zero": "0", "data": "1", "micro_batch": str(ROWS)},
        "optim": {"lr": "3e-4", "schedule": "linear"},
        "train": {"batch_sequences": str(ROWS), "steps": str(steps)},
        "output": {"folder": str(output)},
    }
    path = folder / f"recipe-{run}.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    begin = time.time()
    subprocess.run([sys.executable, "-m", "tercet", "train", str(path)], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    done = [row for row in rows if row["event"] == "step"]
    summary = json.loads((output / "summary.json").read_text())
    timed = done[WARM_UP:]
    imports = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tercet.training.run, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return {
        "first_step_seconds": done[0]["time"] - begin,
        "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in timed),
        "peak_bytes": summary["peak_bytes_per_rank"][0] - int(imports.stdout) * 1024,
        "loss": done[-1]["loss"],
    }


def run_other(which: str, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", which, "--folder", str(folder), "--steps", str(steps)]
    begin = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    found["first_step_seconds"] = found.pop("first_step_at") - begin
    return found


def rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(which: str, folder: Path, steps: int) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    imports = rss()
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    rows = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    config = LlamaConfig(
        vocab_size=SIZES["vocabulary"],
        hidden_size=SIZES["width"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        intermediate_size=SIZES["ffn"],
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    times: list[float] = []
    counts: list[int] = []
    if which == "document":
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        order = torch.randperm(len(rows)).tolist()
        for step in range(steps):
            picked = [rows[order[(step * ROWS + j) % len(order)]] for j in range(ROWS)]
            batch = tokenizer(picked, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            begin = time.perf_counter()
            loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
            counts.append(int((labels[:, 1:] != -100).sum()))
            if step == 0:
                first = time.time()
        final = loss.item()
    else:
        ids = [i for row in tokenizer(rows)["input_ids"] for i in (*row, tokenizer.eos_token_id)]
        blocks = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]
        data = [{"input_ids": b, "labels": b} for b in blocks]
        marks: list[float] = []

        class Mark(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                marks.append(time.perf_counter())

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                nonlocal first
                times.append(time.perf_counter() - marks[-1])
                counts.append(ROWS * (LENGTH - 1))
                if len(times) == 1:
                    first = time.time()

        first = 0.0
        arguments = TrainingArguments(
            output_dir=str(folder / "hf"),
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            bf16=True,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=3e-4,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        )
        result = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Mark()]).train()
        final = result.training_loss
    speed = statistics.median(n / t for n, t in zip(counts[WARM_UP:], times[WARM_UP:], strict=True))
    print(
        json.dumps({"first_step_at": first, "tokens_per_second": speed, "peak_bytes": rss() - imports, "loss": final})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
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
            for contender in CONTENDERS:
                result = (
                    run_tercet(folder, options.steps, run)
                    if contender == "tercet"
                    else run_other(contender, folder, options.steps)
                )
                found[contender].append(result)
                print(f"run {run + 1}, {contender}: {result}", file=sys.stderr, flush=True)
    medians = {c: {k: statistics.median(r[k] for r in results) for k in results[0]} for c, results in found.items()}
    ours = medians["tercet"]
    ratios = {
        c: {k: ours[k] / medians[c][k] for k in ("tokens_per_second", "peak_bytes", "first_step_seconds")}
        for c in CONTENDERS[1:]
    }
    if options.json:
        print(json.dumps({"medians": medians, "ratios": ratios, "runs": found}, indent=2))
        return
    print(f"| {'':9} | trained tokens/s | peak memory, imports taken off | command to first step |")
    print("|---|---|---|---|")
    for c, m in medians.items():
        print(
            f"| {c:9} | {m['tokens_per_second']:.0f} | {m['peak_bytes'] / 1e6:.0f} MB | {m['first_step_seconds']:.1f} s |"
        )
    for c, r in ratios.items():
        print(
            f"tercet / {c}: {r['tokens_per_second']:.2f}x the tokens/s, {r['peak_bytes']:.2f}x the memory, "
            f"{r['first_step_seconds']:.2f}x the time to the first step"
        )


if __name__ == "__main__":
    main()
