"""Preparing text: Tercet's data room beside `datasets.map` with the same tokenizer, in one run.

    python bench/prepare_speed.py [--text FILE] [--megabytes 8] [--runs 5] [--row-characters 1500]

Both sides read the same JSON Lines file and use the same tokenizer.json. Each run is a fresh process with an empty
cache; the sides take turns, and the medians of their times are compared. Imports are not counted on either side.

- tercet: all of `prepare()`: hash the file, check every row, tokenise, pack into rows of 2 048 tokens, write.
- datasets.map: only the call `map(batched=True, num_proc=2)` that tokenises with a transformers tokenizer and writes
  its Arrow cache; nothing is checked or packed.
- datasets load + map: the same with reading the file through `load_dataset("json")`.

Processor seconds are those of the whole process tree between the same two moments (for datasets: map alone); they
change less than times when something else is running.

So the second row favours datasets: it leaves out what prepare does besides. On a small text the start of the two
worker processes weighs on it; --megabytes shows how that changes with size.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS = 2048


def sample_text() -> str:
    """The language reference that every CPython carries."""
    spec = importlib.util.find_spec("pydoc_data")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "topics.py").read_text(encoding="utf-8")
    (topics,) = (s.value for s in ast.parse(source).body if isinstance(s, ast.Assign))
    return "\n\n".join(ast.literal_eval(topics).values())


def write_rows(text: str, path: Path, megabytes: float, characters: int) -> int:
    """Write rows of about `characters` each, the text over and over; returns how many."""
    size, rows = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for start in range(0, len(text), characters):
                row = json.dumps({"text": f"{rows}: {text[start : start + characters]}"}, ensure_ascii=False) + "\n"
                file.write(row)
                size += len(row.encode())
                rows += 1
                if size >= megabytes * 1e6:
                    break
    return rows


# Each side as the program of a fresh process; prints seconds and tokens as JSON.
CPU = """
import resource
def cpu():
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
"""
TERCET = (
    CPU
    + """
import json, sys, time
from tercet.data.prepare import prepare
from tercet.spec.recipe import DataSection
import tokenizers
rows, words, cache = sys.argv[1:]
data = DataSection.model_validate({"train": rows, "tokenizer": words, "sequence_tokens": TOKENS,
                                   "long_rows": "split", "cache": cache})
phases = {}
used = cpu()
begin = time.perf_counter()
def progress(done, total, phase):
    now = time.perf_counter() - begin
    phases.setdefault(phase, [now, now])[1] = now
found = prepare(data, vocabulary=None, model_tokenizer=None, seed=0, progress=progress)
seconds, used = time.perf_counter() - begin, cpu() - used
assert not found.hit
ends = {p: round(b - a, 3) for p, (a, b) in phases.items()}
print(json.dumps({"seconds": seconds, "cpu": used, "tokens": found.report["tokens"]["train"], "phases": ends}))
""".replace("TOKENS", str(TOKENS))
)

DATASETS = (
    CPU
    + """
import json, os, sys, time
rows, words, cache = sys.argv[1:]
os.environ["HF_DATASETS_CACHE"] = cache
import datasets
from transformers import PreTrainedTokenizerFast
datasets.disable_progress_bars()
tokenizer = PreTrainedTokenizerFast(tokenizer_file=words)
end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
def encode(batch):
    return {"input_ids": [ids + [end] for ids in tokenizer(batch["text"])["input_ids"]]}
begin = time.perf_counter()
found = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=cache)
loaded, used = time.perf_counter(), cpu()
found = found.map(encode, batched=True, num_proc=2, remove_columns=["text"])
done, used = time.perf_counter(), cpu() - used
tokens = sum(len(row) for batch in found.iter(1000) for row in batch["input_ids"])
print(json.dumps({"seconds": done - loaded, "cpu": used, "with_load": done - begin, "tokens": tokens}))
"""
)


def measure(program: str, rows: Path, words: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", program, str(rows), str(words), cache]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a UTF-8 text file; default: CPython's language reference")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--row-characters", type=int, default=1500)
    parser.add_argument("--vocabulary", type=int, default=4096)
    options = parser.parse_args()
    from tercet.data import tokenizer

    text = options.text.read_text(encoding="utf-8") if options.text else sample_text()
    with tempfile.TemporaryDirectory() as folder:
        rows, words = Path(folder) / "rows.jsonl", Path(folder) / "words"
        count = write_rows(text, rows, options.megabytes, options.row_characters)
        tokenizer.train(iter([text]), options.vocabulary).save(words)
        ours, theirs = [], []
        for _ in range(options.runs):
            ours.append(measure(TERCET, rows, words / "tokenizer.json"))
            theirs.append(measure(DATASETS, rows, words / "tokenizer.json"))
        size = rows.stat().st_size / 1e6
    tokens = {int(r["tokens"]) for r in ours + theirs}
    if len(tokens) != 1:
        sys.exit(f"the two sides do not make the same tokens: {sorted(tokens)}")
    print(f"{size:.1f} MB, {count} rows, {tokens.pop()} tokens on both sides, {os.cpu_count()} cores,", end=" ")
    print(f"{options.runs} runs")
    base = statistics.median(r["seconds"] for r in ours)
    show("tercet prepare (all of it)", ours, "seconds", size, base)
    show("datasets.map alone", theirs, "seconds", size, base)
    show("datasets load + map", theirs, "with_load", size, base)
    used = [statistics.median(r["cpu"] for r in side) for side in (ours, theirs)]
    print(f"processor seconds: {used[0]:.2f} tercet, {used[1]:.2f} datasets.map: {used[1] / used[0]:.2f} x")
    print("phases of prepare, last run:", ", ".join(f"{p} {s} s" for p, s in ours[-1]["phases"].items()))


def show(name: str, runs: list[dict[str, float]], key: str, size: float, base: float) -> None:
    seconds = [r[key] for r in runs]
    middle = statistics.median(seconds)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(f"{name:<28}{middle:7.2f} s ({spread})  {size / middle:6.2f} MB/s  {middle / base:5.2f} x tercet's time")


if __name__ == "__main__":
    main()
