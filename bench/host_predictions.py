"""Tokens per second that `tercet plan` predicts for strategy host, as the Markdown table of bench/host-resident.md.

    python bench/host_predictions.py

Predictions, not measurements: no card has run them yet.
"""

from __future__ import annotations

from tercet.errors import TercetError
from tercet.planner.answer import plan

MODELS = ("qwen3-1.7b", "llama-3.1-8b", "deepseek-llm-7b", "deepseek-v2-lite", "qwen3-32b")
CARDS = (1, 2, 3, 4, 8)
RAM = ("64GiB", "128GiB", "192GiB", "256GiB")
BATCHES = (24, 48, 96, 192, 384)  # sequences of 2 048 tokens a step


def best(model: str, cards: int, ram: str | None, links: str | None = None) -> tuple[float, int] | None:
    """Return (tokens per second, sequences per step) of the fastest batch that fits, or None."""
    found = []
    for batch in BATCHES:
        try:
            answer = plan(model, ["strategy=host"], gpus=f"{cards}x4090", host_ram=ram, links=links, batch=batch)
        except TercetError:
            continue
        found += [(s["tokens_per_second"], batch) for s in answer["strategies"][:1]]
    return max(found, default=None)


def cell(found: tuple[float, int] | None) -> str:
    return "does not fit" if found is None else f"{found[0]:,.0f} ({found[1]})".replace(",", " ")


def main() -> None:
    print("| model | " + " | ".join(f"{n} x 4090" for n in CARDS) + " |")
    print("|---|" + "---|" * len(CARDS))
    for model in MODELS:
        print(f"| {model} | " + " | ".join(cell(best(model, n, "2048GiB")) for n in CARDS) + " |")
    print("\n| model, 3 x 4090 | " + " | ".join(RAM) + " | 2048GiB, lanes x8,x8,x4 |")
    print("|---|" + "---|" * (len(RAM) + 1))
    for model in MODELS:
        cells = [cell(best(model, 3, ram)) for ram in RAM]
        print(f"| {model} | " + " | ".join([*cells, cell(best(model, 3, "2048GiB", "x8,x8,x4"))]) + " |")


if __name__ == "__main__":
    main()
