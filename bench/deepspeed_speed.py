"""DeepSpeed through Tercet against a hand-written deepspeed.initialize loop, and against native ZeRO at the same stage.

    python bench/deepspeed_speed.py [--ranks 3] [--pairs 7] [--json bench/deepspeed_speed.json]

Every pair runs both sides one after the other in the same processes, in alternating order, so that whatever else
the machine does hits both. Printed: the median of the pairs' ratios with its spread, tokens/s and peak memory of
each side, and the CPU time per step that is spent outside of DeepSpeed and the model (by the profiler of Python).
The hand-written loop has the same model, batches, loss scaling and JSON, but reads nothing, counts nothing and
checks nothing: it is what one would write in fifty lines.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SIZES = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocabulary": 4096, "context_tokens": 256}
TOKENS, ROWS, STEPS = 256, 12, 6


def batches_of(world: Any, step: int, micro: int) -> list[Any]:
    from tests.tiny import micro_batches

    return micro_batches(step, world.rank, world.size, micro, ROWS, TOKENS, SIZES["vocabulary"])


def by_hand(world: Any, zero: int, steps: int) -> tuple[float, float]:
    """The loop that one writes without Tercet: returns (seconds of the steps after the first, last loss)."""
    import torch
    from tests.tiny import tiny_model

    from tercet.engine.deepspeed.engine import _join, import_deepspeed
    from tercet.model.build import make_buffers
    from tercet.model.decoder import Decoder, initial_tensor

    spec = tiny_model(**SIZES)
    engine = tercet_engine(world, zero)  # only to take over its JSON: the same buckets
    config = engine.config
    ds = import_deepspeed()
    _join(world, ds)
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    for t in spec.tensors():
        model.get_parameter(t.name).data.copy_(initial_tensor(t.name, t.shape, t.kind, spec, 7))
    make_buffers(model)
    model.to(torch.bfloat16)
    if zero == 3:
        ds.zero.Init(module=model, config_dict_or_path=config, dtype=torch.bfloat16)
        ds.zero.register_external_parameter(model, model.lm_head.weight)
    other, *_ = ds.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
    )
    dealt = [batches_of(world, step, ROWS // world.size) for step in range(steps)]
    begin = 0.0
    for step, batches in enumerate(dealt):
        if step == 1:
            begin = time.perf_counter()
        tokens = torch.tensor([sum(b.trained_tokens for b in batches)])
        torch.distributed.all_reduce(tokens)
        for batch in batches:
            loss = other(batch.input_ids, positions=batch.positions, documents=batch.documents, labels=batch.labels)
            other.backward(loss * (world.size / tokens.item()), scale_wrt_gas=False)
            other.step()
    return time.perf_counter() - begin, loss.item()


def tercet_engine(world: Any, zero: int, engine: str = "deepspeed") -> Any:
    from tests.deepspeed_tiny import engine_of, layout
    from tests.tiny import tiny_model

    name = f"{'native-' if engine == 'native' else ''}zero{zero}"
    strategy = layout(name, world.size, ROWS, ROWS // world.size, TOKENS)
    return engine_of(world, strategy, ROWS, "bf16", tiny_model(**SIZES))


def through_tercet(world: Any, zero: int, steps: int, engine: str = "deepspeed") -> tuple[float, float]:
    one = tercet_engine(world, zero, engine)
    dealt = [batches_of(world, step, ROWS // world.size) for step in range(steps)]
    begin = 0.0
    for step, batches in enumerate(dealt):
        if step == 1:
            begin = time.perf_counter()
        loss = one.step(batches, 3e-4).loss
    return time.perf_counter() - begin, loss


def pair(world: Any, zero: int, first: str) -> dict[str, float]:
    sides = {"tercet": through_tercet, "by hand": by_hand}
    order = [first, next(name for name in sides if name != first)]
    return {name: sides[name](world, zero, STEPS)[0] for name in order}


def against_native(world: Any, zero: int, first: str) -> dict[str, float]:
    order = [first, "native" if first == "deepspeed" else "deepspeed"]
    return {name: through_tercet(world, zero, STEPS, name)[0] for name in order}


def peak(world: Any, zero: int, engine: str) -> dict[str, Any]:
    """Return what an engine's ranks hold, from its own tensors, and the process's resident peak, in a fresh process."""
    one = tercet_engine(world, zero, engine)
    for step in range(2):
        one.step(batches_of(world, step, ROWS // world.size), 3e-4)
    held = one.memory()
    return {
        "held": {m: sum(rows.values()) for m, rows in held.items()},
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def own_cpu_seconds(world: Any, zero: int) -> float:
    """CPU seconds per step in functions of tercet/engine/deepspeed/engine.py and what they call outside DeepSpeed and model."""
    one = tercet_engine(world, zero)
    one.step(batches_of(world, 0, ROWS // world.size), 3e-4)
    dealt = [batches_of(world, step, ROWS // world.size) for step in range(STEPS)]
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    for batches in dealt:
        one.step(batches, 3e-4)
    profile.disable()
    rows = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    places = ("tercet/engine/deepspeed", "tercet/engine/seeds", "tercet/parallel/world")
    return sum(own for (file, _, _), (_, _, own, _, _) in rows.items() if any(p in file for p in places)) / STEPS


def main() -> None:
    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "ranks": options.ranks,
        "pairs": options.pairs,
        "machine": platform.platform(),
        "sizes": SIZES,
        "rows": ROWS,
        "tokens": TOKENS,
        "stages": {},
    }
    done = ROWS * TOKENS * (STEPS - 1)
    for zero in map(int, options.stages.split(",")):
        pool = Ranks(options.ranks)
        pool.run(pair, zero, "tercet", limit=300)  # imports and first allocations
        pairs, native = [], []
        for n in range(options.pairs):
            pairs.append(pool.run(pair, zero, ("tercet", "by hand")[n % 2], limit=300)[0])
            native.append(pool.run(against_native, zero, ("deepspeed", "native")[n % 2], limit=300)[0])
        cpu = statistics.mean(pool.run(own_cpu_seconds, zero, limit=300))
        pool.stop()
        memory = {}
        for engine in ("deepspeed", "native"):
            fresh = Ranks(options.ranks)
            memory[engine] = fresh.run(peak, zero, engine, limit=300)
            fresh.stop()
        ratios = sorted(p["by hand"] / p["tercet"] for p in pairs)
        others = sorted(p["deepspeed"] / p["native"] for p in native)
        found = {
            "speed_over_by_hand": {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]},
            "native_over_deepspeed": {"median": statistics.median(others), "lowest": others[0], "highest": others[-1]},
            "tokens_per_second": {
                "deepspeed through tercet": done / statistics.median(p["tercet"] for p in pairs),
                "deepspeed by hand": done / statistics.median(p["by hand"] for p in pairs),
                "native": done / statistics.median(p["native"] for p in native),
            },
            "own_cpu_seconds_per_step": cpu,
            "memory": memory,
        }
        report["stages"][zero] = found
        print(
            f"zero {zero}, {options.ranks} ranks: {json.dumps({k: v for k, v in found.items() if k != 'memory'}, indent=2)}"
        )
        for engine, ranks in memory.items():
            print(
                f"  {engine}: held at the peak {[r['held']['peak'] for r in ranks]}, resident {[r['resident'] for r in ranks]}"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
