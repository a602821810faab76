"""Pack documents into rows of a fixed length without cutting any that fits: best-fit decreasing.

Longest documents first, each into the fullest row that still has room for it (Ding et al.: Fewer
Truncations Improve Language Modeling, 2024, use the same rule for training rows). Documents of one length
are placed together, so the work grows with the number of different lengths, not with the number of
documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (order, rows): documents in the order of the rows, and the row of each of them.

    `lengths`: int array of tokens per document, each from 1 to `capacity`. `order` lists every document
    once, row by row; `rows[i]` is the row of document `order[i]` and never falls. Raises ValueError for
    other lengths.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths must lie between 1 and {capacity}")
    by_length = np.argsort(-lengths, kind="stable")
    values, starts = np.unique(-lengths[by_length], return_index=True)
    row_of = np.empty(lengths.size, np.int64)
    room: dict[int, list[np.ndarray]] = {}  # tokens left -> rows that have them, in arrays
    left: list[int] = []  # the keys of `room`, sorted
    opened = 0
    for length, start, end in zip(-values, starts, [*starts[1:], lengths.size], strict=True):
        length = int(length)
        waiting = by_length[start:end]
        while waiting.size:
            at = bisect_left(left, length)
            if at < len(left):
                space = left[at]
                rows = room[space].pop()
                if not room[space]:
                    del room[space], left[at]
            else:
                space = capacity
                rows = np.arange(opened, opened + -(-waiting.size // (capacity // length)))
                opened += rows.size
            each = space // length
            # Rows that can be filled with `each` documents; the last of them may get fewer.
            full = min(rows.size, waiting.size // each)
            if full:
                row_of[waiting[: full * each]] = np.repeat(rows[:full], each)
                _put(room, left, space - each * length, rows[:full])
            waiting, rows = waiting[full * each :], rows[full:]
            if rows.size and waiting.size:
                row_of[waiting] = rows[0]
                _put(room, left, space - waiting.size * length, rows[:1])
                waiting, rows = waiting[:0], rows[1:]
            _put(room, left, space, rows)
    order = np.argsort(row_of, kind="stable")
    return order, row_of[order]


def _put(room: dict[int, list[np.ndarray]], left: list[int], space: int, rows: np.ndarray) -> None:
    if rows.size == 0 or space == 0:
        return
    if space not in room:
        room[space] = []
        insort(left, space)
    room[space].append(rows)
