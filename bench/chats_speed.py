"""Preparing chats: Tercet beside TRL's SFTTrainer, the same rows, tokenizer and template, in one run.

    python bench/chats_speed.py --tokenizer FOLDER [--megabytes 20] [--runs 3] [--trl PATH]

Rows are chats of one to three questions and answers out of the language reference that CPython carries. Each side is a
fresh process with an empty cache; the sides take turns, medians are compared, imports are not counted.

- tercet: all of `prepare()`: hash, check, render, tokenise, masks, best-fit packing, write.
- TRL: `load_dataset("json")` and SFTTrainer's own `_prepare_dataset` with two processes, `assistant_only_loss` (the
  template has generation markers there) and best-fit packing.

Both sides must give the same number of tokens and of trained tokens: printed, and an error otherwise. TRL is not a
dependency: `pip install --no-deps --target PATH trl`, and --trl PATH. Peak memory is that of each side's process tree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from prepare_speed import sample_text

TOKENS = 2048
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

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
from pathlib import Path
from tercet.data.prepare import prepare
from tercet.spec.recipe import DataSection
rows, place, tokenizer, template, tokens = sys.argv[1:]
from transformers import AutoTokenizer
data = DataSection.model_validate({"train": rows, "tokenizer": tokenizer, "template": template, "sequence_tokens": tokens,
                                   "cache": place + "/cache", "long_rows": "drop"})
import tercet.data.spans, jinja2, transformers.utils.chat_template_utils
start, used = time.perf_counter(), cpu()
report = prepare(data, vocabulary=None, model_tokenizer=None, seed=0).report
print(json.dumps({"seconds": time.perf_counter() - start, "cpu": cpu() - used, "tokens": report["tokens"]["train"],
                  "trained": report["trained_tokens"]["train"], "dropped": report["rows"]["dropped"]}))
"""
)

TRL = (
    CPU
    + """
import json, os, sys, time
from types import SimpleNamespace
rows, place, tokenizer, template, tokens = sys.argv[1:]
os.environ["HF_DATASETS_CACHE"] = place + "/cache"
import datasets
from transformers import AutoTokenizer
from trl import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
words = AutoTokenizer.from_pretrained(tokenizer)
words.chat_template = open(template, encoding="utf-8").read()
args = SFTConfig(output_dir=place, max_length=int(tokens), packing=True, dataset_num_proc=2, assistant_only_loss=True,
                 use_cpu=True, report_to="none", bf16=False)
start, used = time.perf_counter(), cpu()
data = datasets.load_dataset("json", data_files=rows, split="train")
me = SimpleNamespace(chat_template=words.chat_template, completion_only_loss=False, _tokenizer=words,
                     _is_vision_dataset=False, assistant_only_loss=True)
found = SFTTrainer._prepare_dataset(me, data, words, args, True, None, "train")
seconds, used = time.perf_counter() - start, cpu() - used
tokens = sum(len(ids) for ids in found["input_ids"])
trained = sum(sum(label != -100 for label in labels) for labels in found["labels"])
print(json.dumps({"seconds": seconds, "cpu": used, "tokens": tokens, "trained": trained, "dropped": 0}))
"""
)


def write_rows(path: Path, megabytes: float) -> int:
    text, draw, size, rows = sample_text(), random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            turns = []
            for _ in range(draw.randint(1, 3)):
                for role, least, most in (("user", 40, 300), ("assistant", 200, 1200)):
                    at = draw.randrange(len(text) - most)
                    turns.append(
                        {"role": role, "content": f"{rows} {text[at : at + draw.randint(least, most)].strip()}"}
                    )
            line = json.dumps({"messages": turns}, ensure_ascii=False) + "\n"
            file.write(line)
            size, rows = size + len(line.encode()), rows + 1
    return rows


def measure(program: str, arguments: list[str], path: str | None) -> dict[str, float]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environment.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    import psutil

    peak, me = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            peak = max(peak, sum(p.memory_info().rss for p in (me, *me.children(recursive=True))))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    assert process.stdout is not None
    lines = process.stdout.read().decode().strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"a side ended with code {process.returncode}")
    return {**json.loads(lines[-1]), "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trl")
    asked = parser.parse_args()
    sides = {"tercet": (TERCET, None), "trl": (TRL, asked.trl)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        rows, template = Path(folder) / "rows.jsonl", Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        count = write_rows(rows, asked.megabytes)
        for run in range(asked.runs):
            for name, (program, path) in sides.items():
                place = Path(folder) / f"{name}-{run}"
                place.mkdir()
                arguments = [str(rows), str(place), asked.tokenizer, str(template), str(TOKENS)]
                found[name].append(measure(program, arguments, path))
                print(name, json.dumps(found[name][-1]), flush=True)
    one, other = (found[name][0] for name in sides)
    print(
        f"{count} rows; tokens {one['tokens']} and {other['tokens']}, trained {one['trained']} and {other['trained']}"
    )
    median = {name: statistics.median(r["seconds"] for r in runs) for name, runs in found.items()}
    peak = {name: max(r["peak_bytes"] for r in runs) / 2**20 for name, runs in found.items()}
    print(", ".join(f"{name}: {median[name]:.1f} s, peak {peak[name]:.0f} MiB" for name in sides))
    used = {name: statistics.median(r["cpu"] for r in runs) for name, runs in found.items()}
    print(f"ratio of times: {median['trl'] / median['tercet']:.1f}")
    print(f"processor seconds: {used['tercet']:.1f} and {used['trl']:.1f}, ratio {used['trl'] / used['tercet']:.1f}")
    if (one["tokens"], one["trained"]) != (other["tokens"], other["trained"]):
        raise SystemExit("the sides do not agree")


if __name__ == "__main__":
    main()
