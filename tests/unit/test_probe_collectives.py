"""What is said when collectives cannot be measured: the first rank's word, not that of those it left behind."""

from __future__ import annotations

from tercet.probe.collectives import publish
from tercet.probe.selftest import _without_places, wait_for_all


class Endless:
    """A process that never ends by itself, and writes down what is done to it."""

    returncode = None

    def __init__(self, rank: int, done: list[str]):
        self.rank, self.done = rank, done

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.done.append(f"kill {self.rank}")

    def wait(self) -> None:
        self.done.append(f"wait {self.rank}")


def test_ranks_that_are_ended_do_not_see_one_another_go():
    done: list[str] = []
    wait_for_all([Endless(rank, done) for rank in range(3)], limit=0.0)
    assert done == [f"{what} {rank}" for what in ("kill", "wait") for rank in range(3)]


def test_the_first_word_stays(tmp_path):
    publish(tmp_path, 2, {"verdict": "rank 2: an all-reduce did not return"})
    publish(tmp_path, 0, {"verdict": "Connection reset by peer"})
    assert "all-reduce" in (tmp_path / "rates.json").read_text()


def test_a_backends_message_is_cut_to_what_it_says():
    text = "[/a/b/pair.cc:537] Read error [127.0.0.1]:15594: Connection reset by peer. This is typically caused by …"
    assert _without_places(text) == "Read error [127.0.0.1]:15594: Connection reset by peer"
