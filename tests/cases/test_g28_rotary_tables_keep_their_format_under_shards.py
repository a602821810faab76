"""G28: DeepSeek-V2 in bf16 trains alike under shards and under ddp: its fp32 rotary tables are not cast."""

from __future__ import annotations

import pytest

from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_strategy


def losses(world, word: str):
    model = tiny_deepseek(family="deepseek_v2", mtp_depth=None)
    engine = tiny_engine(world, tiny_strategy(word, world.size, 3), "bf16", model)
    return [engine.step(micro_batches(s, world.rank, world.size, 1, 3), 0.0).loss for s in range(2)]


@pytest.mark.parametrize("word", ["zero1", "zero3"])
def test_rotary_tables_in_fp32_stay_so_under_shards(pools, word):
    assert tiny_deepseek(family="deepseek_v2", mtp_depth=None).layers[0].attention.fp32_rotation
    assert pools[3].run(losses, word) == pools[3].run(losses, "ddp")
