"""What n-gram models of the same tokens reach on the same validation text: the measure a trained run stands beside.

    python bench/ngram.py RUN

Unigram: counts of the training tokens, add-one. Trigram: interpolated Kneser-Ney with one discount (Chen and
Goodman 1999, eq. 26–28), backing off to bigram and unigram continuation counts. Both are trained on each training
token once and score exactly the predictions that the run's validation loss averages: every token of a document
after its first, documents kept apart.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from tercet.data.loader import Loader
from tercet.data.prepare import prepare
from tercet.spec.families import describe
from tercet.spec.recipe import load_recipe
from tercet.spec.run_folder import open_run

DISCOUNT = 0.75


def documents(rows, sequence: int) -> Iterator[list[int]]:
    """Yield the token lists of packed rows: one per document piece, padding left out."""
    for ids, edges, trained in rows:
        for a, b in itertools.pairwise(edges):
            if trained[a : max(a + 1, b - 1)].any():
                yield ids[a:b].tolist()


def rows_of(batches) -> Iterator[tuple[np.ndarray, list[int], np.ndarray]]:
    for batch in batches:
        tokens = batch.input_ids.shape[1]
        edges = batch.documents.tolist()
        for n, row in enumerate(batch.rows):
            if row < 0:
                continue
            own = [e - n * tokens for e in edges if n * tokens <= e <= (n + 1) * tokens]
            yield batch.input_ids[n].numpy(), own, (batch.labels[n] != -100).numpy()


def unigram(train: list[list[int]], test: list[list[int]], vocabulary: int) -> float:
    counts = Counter(t for d in train for t in d)
    total = sum(counts.values()) + vocabulary
    losses = [-math.log((counts[t] + 1) / total) for d in test for t in d[1:]]
    return sum(losses) / len(losses)


def trigram(train: list[list[int]], test: list[list[int]], vocabulary: int) -> float:
    tri: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    seen_before: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    first: dict[int, Counter[int]] = defaultdict(Counter)
    for d in train:
        for i in range(1, len(d)):
            first[d[i - 1]][d[i]] += 1
            if i > 1:
                tri[d[i - 2], d[i - 1]][d[i]] += 1
                seen_before[d[i - 1]][d[i]].add(d[i - 2])
    bigram = {h: Counter({w: len(before) for w, before in words.items()}) for h, words in seen_before.items()}
    after: dict[int, set[int]] = defaultdict(set)
    for h, words in first.items():
        for w in words:
            after[w].add(h)
    continuation = {w: len(hs) for w, hs in after.items()}
    pairs = sum(continuation.values())

    def p1(w: int) -> float:
        return (max(continuation.get(w, 0) - DISCOUNT, 0) + DISCOUNT * len(continuation) / vocabulary) / pairs

    def interpolate(counts: Counter[int] | None, w: int, lower: float) -> float:
        if not counts:
            return lower
        total = sum(counts.values())
        return (max(counts[w] - DISCOUNT, 0) + DISCOUNT * len(counts) * lower) / total

    losses = []
    for d in test:
        for i in range(1, len(d)):
            # The second token of a document has one token before it, so the plain bigram scores it.
            low = interpolate((bigram if i > 1 else first).get(d[i - 1]), d[i], p1(d[i]))
            losses.append(-math.log(interpolate(tri.get((d[i - 2], d[i - 1])), d[i], low) if i > 1 else low))
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    run = open_run(parser.parse_args().run)
    recipe = load_recipe(run.recipe)
    vocabulary = describe(recipe.model).vocabulary
    prepared = prepare(recipe.data, vocabulary=vocabulary, model_tokenizer=None, seed=recipe.train.seed)
    loader = Loader(prepared, 1, recipe.train.seed)
    epoch = (loader.micro_batches(s, rank=0, ranks=1, micro_batch=1)[0] for s in range(loader.rows_per_epoch))
    train = list(documents(rows_of(epoch), recipe.data.sequence_tokens))
    held_out = loader.evaluation(rank=0, ranks=1, micro_batch=1)
    test = list(documents(rows_of(held_out), recipe.data.sequence_tokens))
    summary = run.read_summary()
    if summary is None:
        sys.exit(f"{run.path} is not finished")
    predictions = sum(len(d) - 1 for d in test)
    print(f"{sum(map(len, train))} training tokens, {predictions} predictions on the validation text")
    print(f"unigram             {unigram(train, test, vocabulary):.4f}")
    print(f"trigram, Kneser-Ney {trigram(train, test, vocabulary):.4f}")
    print(f"this run            {summary['validation_loss']:.4f}")


if __name__ == "__main__":
    main()
