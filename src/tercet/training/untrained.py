"""Marks of chats that the base model has never learned, where a run trains neither their rows nor its head's."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from tercet.data import tokenizer
from tercet.data.prepare import Prepared
from tercet.spec.families import describe
from tercet.spec.model import Model
from tercet.spec.recipe import Recipe
from tercet.weights.reading import stored_weights

ROWS = 64  # of the training set that are looked at
COMPARED = 4096  # words whose norms are the measure
NEAR_ZERO = 1e-2  # of their median
EQUAL = 1e-6  # between norms: no two trained rows agree so far


def untrained_marks(recipe: Recipe, spec: Model, prepared: Prepared) -> str | None:
    """Return what is to be said of marks in the data that the model cannot learn, else None.

    A base model that never saw <|im_end|> has a row for it that is nearly zero, or alike for all of them. Under an
    adapter such a row stays as it is, so the model cannot learn to write it: answers would not end.
    """
    if recipe.model.path is None or recipe.model.init == "random":
        return None
    tables = [t.name for t in spec.tensors() if t.axes[:1] == ("vocabulary",) and not spec.trains(t)]
    marks = _marks(prepared)
    if not tables or not marks:
        return None
    weights = stored_weights(recipe.model.path, spec if spec.adapter is None else describe(recipe.model))
    used, named = _used(prepared), set[str]()
    for table in tables:
        measure = weights.rows(table, 0, min(COMPARED, spec.vocabulary)).float().norm(dim=1).median().item()
        rows = torch.cat([weights.rows(table, word, word + 1) for word in marks]).float()
        untrained = {list(marks)[n] for n in _untrained(rows, measure)}
        named |= {marks[word] for word in untrained & used}
    if not named:
        return None
    modules = [name.removesuffix(".weight").rpartition(".")[2] for name in tables]
    if not spec.frozen:
        cure = f"take {', '.join(modules)} out of train.freeze"
    elif spec.tied:  # spec/adapter.py says why
        cure = "with the whole model (adapter=none), for an adapter cannot train an embedding that is the head too"
    else:
        cure = f"adapter.modules_to_save=[{','.join(modules)}]"
    return (
        f"the base model has never learned {', '.join(sorted(named))}, which the data holds: their rows in "
        f"{' and '.join(modules)} are near zero or all alike, and this run does not train them, so answers may not end. "
        f"Train them: {cure}"
    )


def _marks(prepared: Prepared) -> dict[int, str]:
    """Return id -> text of the tokenizer's control and added tokens."""
    place = prepared.tokenizer_folder
    file = place / "tokenizer.json"
    loaded = tokenizer.load(file if file.is_file() else place)
    return {number: token.content for number, token in sorted(loaded.backend.get_added_tokens_decoder().items())}


def _used(prepared: Prepared) -> set[int]:
    count = min(ROWS, prepared.train.rows_per_epoch)
    return {int(word) for sample in range(count) for word in prepared.train.row(sample)[0]}


def _untrained(rows: Tensor, measure: float) -> list[int]:
    """Return which of these rows are near zero, or as long as another of them."""
    norms = (rows.norm(dim=1) / measure / EQUAL).nan_to_num().round().tolist()
    alike = Counter(norms)
    return [n for n, norm in enumerate(norms) if norm * EQUAL < NEAR_ZERO or alike[norm] > 1]
