"""E01: the first collective hangs or returns wrong data; a self-test finds it in time and sets the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet.errors import TercetError
from tercet.probe.selftest import REPAIRS, Verdict, check_collectives, find_working_environment, run_check

FAULTY = str(Path(__file__).with_name("faulty_selftest.py"))


@pytest.mark.parametrize(
    ("fault", "kind", "ranks"), [pytest.param("hang", "hang", 3, marks=pytest.mark.slow), ("zeros", "wrong", 2)]
)
def test_found_within_the_limit_and_repaired(fault, kind, ranks):
    said: list[str] = []
    verdicts: list[Verdict] = []

    def attempt(variables: dict[str, str]) -> Verdict:
        verdicts.append(run_check(ranks, 3.0, variables, entry=(FAULTY, fault)))
        return verdicts[-1]

    variables = find_working_environment(attempt, said.append)
    assert [v.kind for v in verdicts] == [kind, "healthy"]
    assert variables == {"NCCL_P2P_DISABLE": "1"}
    assert "NCCL_P2P_DISABLE=1" in said[0] and verdicts[0].says in said[0]
    assert "NCCL_P2P_DISABLE" not in os.environ  # set for the children only


def check_alone(world):
    return check_collectives(world, 30.0)


def test_healthy_ranks_pass(pools):
    for verdict in pools[3].run(check_alone):
        assert verdict.ok, verdict.says


def test_when_nothing_helps_it_says_so():
    tried: list[dict[str, str]] = []

    def attempt(variables: dict[str, str]) -> Verdict:
        tried.append(variables)
        return Verdict("wrong", "rank 1: wrong sums", 0.1)

    with pytest.raises(TercetError, match="--ranks 1") as caught:
        find_working_environment(attempt)
    assert "rank 1: wrong sums" in str(caught.value)
    assert tried == [{}, {REPAIRS[0][0]: "1"}, {REPAIRS[0][0]: "1", REPAIRS[1][0]: "1"}]
