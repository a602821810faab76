"""Loading a 135 M model: our load_model against transformers' from_pretrained, pairs, each in a process of its own.

    python bench/load_speed.py [--pairs 5]

The folder is SmolLM2-135M's shape with random bf16 weights (270 MB), cached by the system before the first pair.
Both sides load a tiny model first: finding and importing classes is no part of loading. Each page of the weights is
then touched, since a memory map has loaded nothing yet. Printed are median seconds and the growth of peak memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
from tercet.weights.reading import load_model as load
load(TINY)
"""
THEIRS = """
import torch
from transformers import AutoModelForCausalLM
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
load(TINY)
"""
MEASURE = """
import os, resource, time
def level(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before, begin = level(), time.perf_counter()
model = load(FOLDER)
total = sum(float(p.detach().view(-1)[::2048].sum()) for p in model.parameters())  # one number of every page
seconds = time.perf_counter() - begin
print(seconds, max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))
"""


def measure(setup: str, folder: Path, tiny: Path) -> tuple[float, float]:
    code = f"FOLDER, TINY = {str(folder)!r}, {str(tiny)!r}\n{setup}{MEASURE}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, growth = map(float, out.split()[-2:])
    return seconds, growth


def main() -> None:
    import torch

    from tercet.model.decoder import initial_tensor
    from tercet.spec.families import describe, preset
    from tercet.spec.recipe import ModelSection
    from tercet.weights.writing import save_folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        folder, tiny = Path(name) / "model", Path(name) / "tiny"
        small = describe(ModelSection(preset="smollm2-135m", layers=1, width=64, heads=2, ffn=64, vocabulary=100))
        for path, spec in ((folder, preset("smollm2-135m")), (tiny, small)):
            tensors = ((t.name, initial_tensor(t.name, t.shape, t.kind, spec, 0)) for t in spec.tensors())
            save_folder(path, spec, tensors, torch.bfloat16)
        found = {"ours": [], "transformers": []}
        for _ in range(pairs):
            found["ours"].append(measure(OURS, folder, tiny))
            found["transformers"].append(measure(THEIRS, folder, tiny))
    for side, rows in found.items():
        seconds, growth = (statistics.median(row[k] for row in rows) for k in (0, 1))
        print(f"{side:13} {seconds:.2f} s, peak memory grows by {growth / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
