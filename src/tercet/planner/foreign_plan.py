"""The plan of what a DeepSpeed or Accelerate file asks for, beside what the planner would choose itself."""

from __future__ import annotations

from typing import Any

from tercet.planner.answer import plan
from tercet.planner.foreign import Reading, read_accelerate, read_deepspeed, read_file
from tercet.planner.table import need_lines
from tercet.spec.machine import parse_gpus


def plan_from_files(
    name: str | None,
    overrides: list[str],
    deepspeed: str | None,
    accelerate: str | None,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """Return the plan of what the files ask for, and beside it what the planner would choose itself.

    `read` holds printable lines, `findings` the keys that do nothing, contradict or are unknown. Without a model
    there is nothing to predict, and only these are returned.
    """
    ranks = machine.get("ranks") or _count(machine.get("gpus"))
    if accelerate:
        found = read_accelerate(read_file(accelerate), accelerate)
        if deepspeed:
            inner = read_deepspeed(read_file(deepspeed), deepspeed, ranks or found.ranks)
            inner.findings = found.findings + inner.findings
            found = inner
    else:
        found = read_deepspeed(read_file(deepspeed or ""), deepspeed or "", ranks)
    ranks = ranks or found.ranks
    lines = reading_lines(found)
    common: dict[str, Any] = {
        "read": lines,
        "findings": [{"key": k, "kind": kind, "says": s} for k, kind, s in found.findings],
        "means": {k: v for k, v in found.__dict__.items() if k not in ("findings", "path")},
    }
    if name is None:
        return {
            **common,
            "strategies": [],
            "refused": [],
            "notes": ["name a model to see what this would take"],
            "assumed": [],
        }
    if ranks and not machine.get("gpus"):
        machine = {**machine, "ranks": ranks}
    if found.batch and not machine.get("batch"):
        machine = {**machine, "batch": str(found.batch)}
    own = plan(name, list(overrides), **machine)
    asked = plan(name, [*overrides, *as_overrides(found)], **machine)
    first = asked["strategies"] + asked["refused"]
    taken = []
    for entry in first[:1]:
        need = (
            {k: entry.get(k) for k in ("card_bytes", "host", "tokens_per_second")}
            if "card_bytes" in entry
            else None
        )
        taken = need_lines({"would_need": need} if need else entry)
    return {
        **own,
        **common,
        "read": [*lines, *taken, "What the planner would take instead:"],
        "asked": first[:1],
    }


def _count(gpus: str | None) -> int | None:
    return parse_gpus(gpus)[0] if gpus else None


def as_overrides(found: Reading) -> list[str]:
    """Return the reading as recipe overrides."""
    result = [f"strategy.zero={found.zero}", f"strategy.offload.optimizer={found.offload_optimizer}",
              f"strategy.offload.weights={found.offload_weights}"]  # fmt: skip
    if found.offload_optimizer != "none" or found.offload_weights != "none":
        result.append("strategy.engine=deepspeed")
    if found.micro_batch:
        result.append(f"strategy.micro_batch={found.micro_batch}")
    if found.recompute:
        result.append(f"strategy.recompute={found.recompute}")
    if found.precision in ("fp16", "bf16", "fp8"):
        result.append(f"train.precision={found.precision}")
    return result


def reading_lines(found: Reading) -> list[str]:
    words = [f"zero {found.zero}"]
    if found.offload_optimizer != "none":
        words.append(f"optimizer on {found.offload_optimizer}")
    if found.offload_weights != "none":
        words.append(f"weights on {found.offload_weights}")
    if found.precision:
        words.append(found.precision)
    if found.batch:
        words.append(
            f"batch {found.batch} = micro-batch {found.micro_batch} x accumulation {found.accumulation} x {found.ranks or 1} ranks"
        )
    elif found.accumulation:
        words.append(f"accumulation {found.accumulation}")
    lines = [f"{found.path} means: {', '.join(words)}"]
    return lines + [f"  {kind}: {sentence}" for _, kind, sentence in found.findings]
