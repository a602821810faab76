"""compare: predicted beside measured. Missing stays missing."""

from __future__ import annotations

import pytest
from tests.run_folders import ROWS

from tercet.planner.answer import predict
from tercet.report.compare import MEMORY_ROWS, compare, error_of
from tercet.report.show import comparison_groups, comparison_note
from tercet.spec.machine import machine_of
from tercet.spec.recipe import build_recipe
from tercet.spec.strategy import Strategy


def by_name(rows, group):
    return {row["what"]: row for row in rows if row["group"] == group}


def test_error_is_predicted_over_measured_less_one():
    assert error_of(110, 100) == pytest.approx(0.1)
    assert error_of(50, 100) == -0.5
    assert error_of(0, 0) == 0
    assert error_of(5, 0) is None
    assert error_of(None, 5) is None
    assert error_of(5, None) is None


def test_the_rows_are_the_ledgers():
    from tercet.planner.ledger import CARD_ROWS

    assert MEMORY_ROWS == CARD_ROWS == ROWS


def test_memory_is_the_fullest_rank_at_both_moments():
    plan = {"moments": {"between_steps": {"weights": 400}, "peak": {"weights": 1200}}}
    summary = {"memory": {"between_steps": [{"weights": 400}, {"weights": 380}], "peak": [{"weights": 1000}] * 2}}
    rows = compare(plan, summary)
    between, peak = by_name(rows, "between steps")["weights"], by_name(rows, "at the peak")["weights"]
    assert (between["predicted"], between["measured"], between["error"]) == (400, 400, 0)
    assert (peak["predicted"], peak["measured"], peak["error"]) == (1200, 1000, pytest.approx(0.2))
    assert {row["unit"] for row in rows} == {"bytes"}


def test_a_plan_may_give_rows_per_rank_or_the_peak_alone():
    per_rank = {"moments": {"peak": [{"weights": 5}, {"weights": 7}]}}
    assert by_name(compare(per_rank, {}), "at the peak")["weights"]["predicted"] == 7
    assert by_name(compare({"ledger": {"weights": 9}}, {}), "at the peak")["weights"]["predicted"] == 9
    assert by_name(compare({"ledger": {"weights": 9}}, {}), "between steps")["weights"]["predicted"] is None


def test_missing_figures_are_none_and_never_zero():
    rows = compare({"moments": {"peak": {"activations": 300}}}, {"memory": {"peak": [{"weights": 10}]}})
    peak = by_name(rows, "at the peak")
    assert peak["activations"]["measured"] is None
    assert peak["activations"]["error"] is None
    assert peak["weights"]["predicted"] is None
    assert peak["logits"]["predicted"] is None and peak["logits"]["measured"] is None


@pytest.mark.parametrize("broken", [None, "much", [], {"peak": None}, {"peak": [None]}, {"peak": [{"weights": "x"}]}])
def test_what_is_no_number_counts_as_missing(broken):
    for rows in (
        compare({"moments": broken}, {}),
        compare({}, {"memory": broken, "peak_bytes_per_rank": broken}),
    ):
        assert all(row["predicted"] is None and row["measured"] is None for row in rows)


def test_resident_memory_is_held_against_all_rows_and_allocated_against_all_but_reserve():
    peak = dict(zip(ROWS, (1, 2, 3, 4, 5, 6, 7, 100), strict=True))
    measured = {"peak_bytes_per_rank": [90, 120]}
    on_cpu = compare({"moments": {"peak": peak}, "machine": {"kind": "cpu"}}, measured)[-1]
    assert (on_cpu["what"], on_cpu["predicted"], on_cpu["measured"]) == ("resident at the peak", 128, 120)
    on_card = compare({"moments": {"peak": peak}, "machine": {"kind": "gpu"}}, measured)[-1]
    assert (on_card["what"], on_card["predicted"], on_card["measured"]) == ("allocated at the peak", 28, 120)
    said = compare({"moments": {"peak": peak}, "machine": {"kind": "gpu"}}, {**measured, "device": "cpu"})[-1]
    assert said["predicted"] == 128  # the run knows better than the plan where it ran


def test_a_whole_is_not_predicted_from_parts_or_for_an_unknown_device():
    measured = {"peak_bytes_per_rank": [120]}
    unknown = compare({"moments": {"peak": dict.fromkeys(ROWS, 1)}}, measured)[-1]
    assert (unknown["predicted"], unknown["measured"]) == (None, 120)
    parts = compare({"moments": {"peak": {"weights": 1}}, "machine": {"kind": "cpu"}}, measured)[-1]
    assert parts["predicted"] is None


def test_time_rows_and_the_parts_that_both_sides_have():
    plan = {"tokens_per_second": 600, "step_seconds": 1.5, "clock": {"matmul": 1.0, "loss": 0.5}}
    rows = by_name(compare(plan, {"tokens_per_second": 500, "step_seconds": None, "clock": {"loss": 0.4}}), "time")
    assert rows["tokens per second"]["error"] == pytest.approx(0.2)
    assert rows["step"]["measured"] is None
    assert rows["loss"]["error"] == pytest.approx(0.25)
    assert "matmul" not in rows
    assert by_name(compare({}, {}), "time") == {}


def test_speeds_are_of_one_kind_of_tokens():
    """A run of chats trains a tenth of its positions; the plan counts them all."""
    plan = {"tokens_per_second": 1024 / 8.0, "step_seconds": 8.0}
    rows = by_name(compare(plan, {"tokens_per_second": 100 / 10.0, "step_seconds": 10.0}), "time")
    assert rows["tokens per second"]["measured"] == pytest.approx(1024 / 10)
    assert rows["tokens per second"]["error"] == pytest.approx(0.25) and rows["step"]["error"] == pytest.approx(-0.2)


def test_a_prediction_carries_the_plans_range():
    recipe = build_recipe({"model": "llama-3.2-1b", "data": {"train": "-"}})
    plan = predict(recipe, Strategy(ranks=3, zero=3, micro_batch=2, recompute="full"), machine_of("3x4090"))
    measured = {"tokens_per_second": 0.9 * plan["tokens_per_second"], "step_seconds": plan["step_seconds"] / 0.9}
    rows = compare(plan, measured)
    time = by_name(rows, "time")
    for key, what in (("tokens_per_second", "tokens per second"), ("step_seconds", "step")):
        low, high = time[what]["range"]
        assert [low, high] == plan["ranges"][key] and low < plan[key] < high
    shown = {row["what"]: row for group in comparison_groups(rows) for row in group["rows"]}
    assert " to " in shown["tokens per second"]["predicted"] and "four of five" in comparison_note(rows).lower()
    without = compare({"tokens_per_second": 10.0}, measured)
    assert "range" not in by_name(without, "time")["tokens per second"]
    broken = compare({"tokens_per_second": 10.0, "ranges": {"tokens_per_second": ["?", None]}}, measured)
    assert "range" not in by_name(broken, "time")["tokens per second"]
