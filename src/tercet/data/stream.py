"""Sets larger than memory or disk, trained while they are prepared: part by part, each like a set of its own.

A source is cut into parts (`parts`); an epoch takes them in the order of a seed, and the rows within each in an order
of their own. A part is checked, tokenised and packed when it is due; a helper does the next one meanwhile. On disk are
a few parts, and of all that were ever prepared the number of their rows: with those numbers the place of any sample is
found without preparing what comes before it, so resuming costs one part, wherever it is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import orjson

from tercet import children
from tercet.data import cache, order, parts
from tercet.data.corpus import NothingLeft
from tercet.data.shards import Rows
from tercet.data.sources import Source
from tercet.errors import InputError
from tercet.spec.recipe import DataSection

PART_BYTES = 64_000_000
KEPT_PARTS = 3  # on disk behind the one that is trained; ranks are less than a step apart
COUNTS = "counts.jsonl"


def cut_all(sources: list[Source]) -> list[list[Source]]:
    """Return each source's parts."""
    return [parts.cut(source, PART_BYTES) for source in sources]


@dataclass(frozen=True)
class Builder:
    """Prepares parts into `folder`, each under a name of its own; a process of any kind may have it."""

    data: DataSection
    parts: list[list[Source]]  # per source
    tokenizer: Path
    folder: Path

    def rows(self, source: int, part: int, say: Callable[[str], None]) -> Rows | None:
        """Return a part's rows, prepared now or found; None when none of it is left."""
        from tercet.data.prepare import build_part

        name = f"{source}-{part:06d}"

        def build(scratch: Path) -> dict[str, object]:
            try:
                return build_part(self.data, self.parts[source][part], self.tokenizer, scratch)
            except NothingLeft:
                return {"train": []}

        while True:
            manifest, _ = cache.fill(self.folder, name, build, say)
            if not manifest["train"]:
                return None
            weights = manifest["palette"]
            tokens, dtype = manifest["sequence_tokens"], manifest["dtype"]
            found = Rows(self.folder / name, manifest["train"][0], tokens, dtype, weights and tuple(weights))
            with contextlib.suppress(FileNotFoundError):  # another run of the same data has dropped it just now
                return found.opened()

    def drop(self, source: int, part: int) -> None:
        """Remove a part; whoever has it open reads on, and whoever finds it finds the whole of it or nothing."""
        doomed = self.folder / f"{source}-{part:06d}.{os.getpid()}.dropped"
        with contextlib.suppress(OSError):  # another run was first
            (self.folder / f"{source}-{part:06d}").rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@dataclass
class _Stream:
    """One source's endless sequence of rows."""

    builder: Builder
    source: int
    seed: int
    counts: dict[int, int]  # part -> rows, of those that are known
    say: Callable[[str], None]
    ends: list[int] = field(default_factory=list)  # rows up to the end of each part, in the order of training
    open: dict[int, Rows] = field(default_factory=dict)  # by part
    helper: subprocess.Popen[bytes] | None = None

    def part_at(self, position: int) -> int:
        epoch, inside = divmod(position, len(self.builder.parts[self.source]))
        return int(order.permutation(len(self.builder.parts[self.source]), self.seed, epoch, self.source)[inside])

    def place(self, number: int, ahead: bool) -> tuple[Rows, int]:
        """Return (rows of a part, index) of the source's row `number`; `ahead`: prepare what comes next meanwhile."""
        replayed = 0
        while not self.ends or self.ends[-1] <= number:
            part, size = self.part_at(len(self.ends)), len(self.builder.parts[self.source])
            if part not in self.counts:
                replayed += 1
                self._note(part, replayed)
            self.ends.append((self.ends[-1] if self.ends else 0) + self.counts[part])
            if len(self.ends) >= size and self.ends[-1] == 0:
                raise InputError(
                    f"{self.builder.parts[self.source][0].name}: no row of the whole set can be trained on"
                )
        position = bisect_right(self.ends, number)
        part, begin = self.part_at(position), self.ends[position - 1] if position else 0
        rows = self._opened(position, part, ahead)
        return rows, int(order.permutation(len(rows), self.seed, position, self.source, 1)[number - begin])

    def _note(self, part: int, replayed: int) -> None:
        """Prepare a part whose number of rows is not known yet. One at a time is training; more are a replay."""
        if replayed == 2:
            self.say("the cache no longer knows how many rows the parts before have: they are prepared again")
        rows = self.builder.rows(self.source, part, self.say)
        if rows is not None:
            self.open[part] = rows
        self.counts[part] = 0 if rows is None else len(rows)
        with (self.builder.folder / COUNTS).open("ab") as file:  # one short write: lines of several ranks do not mix
            file.write(orjson.dumps([self.source, part, self.counts[part]]) + b"\n")

    def _opened(self, position: int, part: int, ahead: bool) -> Rows:
        if part not in self.open:
            rows = self.builder.rows(self.source, part, self.say)
            assert rows is not None  # a place was found in it
            self.open[part] = rows
        if ahead and self.helper is None:
            self.helper = _start(self.builder, self.source, self.part_at(position + 1))
        wanted = {self.part_at(p) for p in range(max(0, position - KEPT_PARTS), position + 2)}
        for old in self.open.keys() - wanted:
            del self.open[old]
            self.builder.drop(self.source, old)
            if self.helper is not None and self.helper.poll() is not None:
                self.helper = None
        return self.open[part]


class StreamMix:
    """What `Mix` is to prepared sets: which row is trained as the n-th. Without weights sources share by their bytes."""

    rows_per_epoch = 0  # not known before the end

    def __init__(self, builder: Builder, weights: tuple[float, ...] | None, seed: int, say: Callable[[str], None]):
        self.builder, self.weights, self.seed, self.say = builder, weights, seed, say
        self.sources = builder.parts
        sizes = [Fraction(sum(s.bytes for s in source)) for source in builder.parts]
        numbers = [Fraction(str(w)) for w in weights] if weights else sizes
        self.shares = tuple(n / sum(numbers) for n in numbers)
        builder.folder.mkdir(parents=True, exist_ok=True)
        counts = _read_counts(builder.folder / COUNTS)
        self._streams = [
            _Stream(builder, n, seed, {p: rows for (s, p), rows in counts.items() if s == n}, say)
            for n in range(len(self.sources))
        ]

    def seeded(self, seed: int) -> StreamMix:
        return StreamMix(self.builder, self.weights, seed, self.say)

    def rows_at(self, sample: int, ahead: bool = False) -> tuple[int, Rows, int]:
        """Return (source, rows, index in them) of sample number `sample`, from 0: a function of seed and number."""
        source, before = order.owner(self.shares, sample)
        return (source, *self._streams[source].place(before, ahead))

    def ready(self, samples: range, ahead: bool) -> None:
        """Have the parts of these samples prepared. All ranks ask for the same ones, so none waits in a collective."""
        for sample in samples:
            self.rows_at(sample, ahead)


def _read_counts(path: Path) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(orjson.JSONDecodeError, ValueError, TypeError):  # a torn last line
                source, part, rows = orjson.loads(line)
                found[source, part] = rows
    return found


def _start(builder: Builder, source: int, part: int) -> subprocess.Popen[bytes]:
    """Have a fresh process prepare a part. Should it fail, whoever needs the part meets the same error."""
    process = subprocess.Popen(
        children.command("tercet.data.stream"),
        env=children.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent; this one ends with its part
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump((replace(builder), source, part), pipe)
    return process


def main() -> None:
    builder, source, part = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(Exception):
        builder.rows(source, part, lambda text: None)


if __name__ == "__main__":
    main()
