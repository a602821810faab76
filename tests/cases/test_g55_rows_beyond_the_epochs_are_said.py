"""G55: when the last step goes on into another epoch, the run says so with counts; when it does not, it is silent."""

from __future__ import annotations

import pytest

from tercet.spec.recipe import load_recipe
from tercet.training.assembly import rows_beyond, steps_of


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "said"),
    [
        (10, 4, 1, "10 sequences are 2.5 batches of 4, trained in 3 whole steps; the last one takes 2 sequences more"),
        (3, 8, 1, "3 sequences are 0.375 batches of 8, trained in 1 whole steps; the last one takes 5 sequences more"),
        (10, 4, 3, "30 sequences are 7.5 batches of 4, trained in 8 whole steps; the last one takes 2 sequences more"),
        (12, 4, 1, None),
        (10, 4, 2, None),
    ],
)
def test_counts(rows, batch, epochs, said):
    recipe = load_recipe(
        "first-light", ["train.steps=null", f"train.epochs={epochs}", f"train.batch_sequences={batch}"]
    )
    found = rows_beyond(recipe, rows, steps_of(recipe, rows))
    assert found is None if said is None else said in str(found)
