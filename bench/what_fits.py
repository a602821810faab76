"""The README's table of models and machines, as the planner sees them: python bench/what_fits.py [--write].

--write puts it into both READMEs, between the marks. tests/house/test_front_page.py keeps it true.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tercet.planner.answer import plan

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- what_fits -->", "<!-- /what_fits -->"
MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "deepseek-llm-7b", "deepseek-v2-lite")
MACHINES = {"1x4090": "64GiB", "2x3090": "128GiB", "3x4090": "128GiB", "3x4090 ": "256GiB"}


def cell(model: str, gpus: str, host_ram: str) -> tuple[str, float]:
    """Return (where the optimizer lies, tokens per second); ("no", 0) when nothing fits."""
    fits = plan(model, gpus=gpus.strip(), host_ram=host_ram)["strategies"]
    if not fits:
        return "no", 0.0
    places = {"none": "cards", "cpu": "cards + RAM", "nvme": "cards + NVMe"}
    chosen = fits[0]["strategy"]
    where = "cpu" if chosen["engine"] == "host" else chosen["offload_optimizer"]
    return places[where], fits[0]["tokens_per_second"]


def shown(where: str, speed: float) -> str:
    """Return a cell; speeds in two figures, for a prediction has no more."""
    return f"{where}: {float(f'{speed:.2g}'):,.0f}".replace(",", " ") if speed else where


def table() -> str:
    """Return the Markdown table; training all parameters, 96 sequences of 2 048 tokens a step."""
    head = ["model", *(f"{gpus.strip()}, {ram.replace('GiB', ' GiB')}" for gpus, ram in MACHINES.items())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for model in MODELS:
        cells = [shown(*cell(model, gpus, ram)) for gpus, ram in MACHINES.items()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    found = table()
    print(found)
    if "--write" in sys.argv:
        for name in ("README.md", "README.zh-CN.md"):
            path = ROOT / name
            before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
            after = rest.partition(END)[2]
            path.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
