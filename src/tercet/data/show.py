"""Documents as the model will see them: pieces of text, each trained or not, in the order of training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tercet.data.prepare import Prepared


def documents(prepared: Prepared, count: int, ids: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the first documents that are trained: {number, path, sequence, tokens, trained, pieces}.

    A piece is {text, weight}, weight 0 where it is read but not trained; with `ids` also its tokens as {id, text}.
    """
    from tercet.data.tokenizer import load

    tokenizer = load(prepared.tokenizer_folder / "tokenizer.json")
    number = 0
    for sample in range(min(count, prepared.train.rows_per_epoch)):
        source, row = prepared.train.place(sample)
        rows = prepared.train.sources[source]
        tokens, lengths = rows.row(row)
        trained = rows.trained(row)
        weights = np.ones(tokens.size, np.float32) if trained is None else trained
        at = 0
        for length in lengths:
            own, counts = tokens[at : at + length].tolist(), weights[at : at + length].tolist()
            at += int(length)
            counts[0] = 0.0  # nothing stands before it to predict it
            number += 1
            yield {
                "number": number,
                "path": prepared.report["sources"][source]["path"],
                "sequence": row,
                "tokens": len(own),
                "trained": sum(map(bool, counts)),
                "pieces": list(_pieces(tokenizer, own, counts, ids)),
            }
            if number == count:
                return


def _pieces(tokenizer: Any, ids: list[int], weights: list[float], with_ids: bool) -> Iterator[dict[str, Any]]:
    at = 0
    for weight, group in groupby(weights):
        length = len(list(group))
        own = ids[at : at + length]
        at += length
        piece: dict[str, Any] = {"text": tokenizer.decode(own), "weight": weight}
        if with_ids:
            piece["ids"] = [{"id": i, "text": tokenizer.decode([i])} for i in own]
        yield piece
