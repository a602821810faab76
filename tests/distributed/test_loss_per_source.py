"""The loss of each source of a mix: the token mean over its rows, whatever ranks and micro-batches they fall on."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from tercet.data.loader import Loader
from tercet.data.prepare import prepare
from tercet.parallel.world import World
from tercet.report.page import write_report
from tercet.report.sources import mean_loss, source_rows
from tercet.report.story import read_story
from tercet.spec.run_folder import RunFolder
from tercet.training.record import Recorder, source_names
from tests.loops import loop_of, recorder_of
from tests.run_folders import FakeRun
from tests.texts import section, sentence, write_rows
from tests.tiny import global_batch, micro_batches, tiny_engine, tiny_model, tiny_strategy

ROWS, STEPS, SOURCES = 7, 3, 3
ALONE = World(0, 1, 0, torch.device("cpu"))
WEIGHTS = torch.tensor([0.25, 0.5, 1.0, 2.0])


def source_of(row: int) -> int:
    """Rows 0, 1, 4 and 5 are of the first source, 2, 3 and 6 of the third; of the second there is none."""
    return 0 if row % 4 < 2 else 2


class Mixed:
    """Batches with loss weights that hang on row and place, and the source of each row."""

    def micro_batches(self, step, *, rank, ranks, micro_batch):
        batches = micro_batches(step, rank, ranks, micro_batch, ROWS)
        for batch in batches:
            number = torch.tensor(batch.rows)[:, None] + torch.arange(batch.labels.shape[1])
            batch.weights = WEIGHTS[number % 4]
            batch.sources = [source_of(row) if row >= 0 else -1 for row in batch.rows]
        return batches


def train(world, word, micro, folder=None):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro), sources=SOURCES)
    record = None if folder is None else recorder_of(world, folder, STEPS)
    seen = []
    take = engine.step
    engine.step = lambda *arguments: seen.append(take(*arguments)) or seen[-1]
    loop_of(world, engine, Mixed(), STEPS, micro_batch=micro, record=record).run()
    if record is not None:
        record.close()
    return [result.by_source for result in seen], [result.loss for result in seen]


def expected() -> list[list[tuple[float, float]]]:
    """Row by row, each alone, in float64: summed loss and weight per source before the first update."""
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 1))
    module = engine.module.double()
    ids, labels = global_batch(0, ROWS)
    sums = [[0.0, 0.0] for _ in range(SOURCES)]
    half = ids.shape[1] // 2
    labels[:, half - 1] = -100  # as tests.tiny cuts documents
    for row in range(ROWS):
        # Two documents a row, each by itself.
        logits = torch.cat([module(part[None]) for part in ids[row].split(half)], 1)[0]
        each = F.cross_entropy(logits, labels[row], ignore_index=-100, reduction="none")
        counts = WEIGHTS[(row + torch.arange(ids.shape[1])) % 4] * (labels[row] != -100)
        sums[source_of(row)][0] += (each * counts).sum().item()
        sums[source_of(row)][1] += counts.sum().item()
    return sums


@pytest.mark.parametrize(
    ("ranks", "word", "micro"), [(1, "single", 2), (1, "host", 3), (3, "ddp", 1), (3, "zero3", 2), (2, "zero2", 1)]
)
def test_each_source_has_its_own_token_mean(pools, ranks, word, micro):
    for by_source, losses in pools[ranks].run(train, word, micro):
        for (loss, weight), (true_loss, true_weight) in zip(by_source[0], expected(), strict=True):
            assert weight == pytest.approx(true_weight, rel=1e-12)
            assert loss == pytest.approx(true_loss, rel=1e-5)
        for sums, loss in zip(by_source, losses, strict=True):
            assert sum(s for s, _ in sums) / sum(w for _, w in sums) == pytest.approx(loss, rel=1e-6)


def test_events_tensorboard_and_report_show_it(pools, tmp_path):
    """Of three ranks: rank 0 writes what all of them lost."""
    alone = train(ALONE, "single", 1)[0]
    fake = FakeRun(tmp_path / "run", STEPS)
    fake.begin()
    paths = ["first/a.jsonl", "second/a.jsonl", "c.jsonl"]
    start = json.loads(fake.run.events.read_text())
    fake.run.events.write_text(json.dumps({**start, "sources": paths}) + "\n")
    pools[3].run(train, "zero2", 2, fake.run.path)
    steps = [e for e in fake.run.read_events() if e["event"] == "step"]
    for event, sums in zip(steps, alone, strict=True):
        assert event["source_loss"][1] is None and event["source_weight"][1] == 0
        for n in (0, 2):
            assert event["source_loss"][n] == pytest.approx(sums[n][0] / sums[n][1], rel=1e-5)
    story = read_story(fake.run)
    first = sum(step[0][0] for step in alone) / sum(step[0][1] for step in alone)
    assert mean_loss(story.steps, 0)[0] == pytest.approx(first, rel=1e-5)  # a mean of sums, not of means
    page = write_report(fake.run).read_text()
    assert "Loss of first/a.jsonl" in page and "Loss of second/a.jsonl" not in page.replace("aria-label", "")
    assert f"{source_rows(story.sources, story.steps)[2]['last']:.4f}" in page


def test_a_resumed_run_goes_on(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard reads its files by name: second, host, process, and a number that counts within the process.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    run = RunFolder(tmp_path)
    step = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 10, "seconds": 0.1, "tokens_per_second": 100.0}
    for first, last, mark in ((0, 6, 1.0), (4, 8, 2.0)):
        record = Recorder(run, 8, None, first, sources=["a.jsonl", "b.jsonl"])
        for number in range(first + 1, last + 1):
            of_b = None if number % 2 else mark + 10
            record.step(
                number, loss=mark, source_loss=[mark, of_b], source_weight=[8.0, 0.0 if of_b is None else 2.0], **step
            )
        record.close()
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    shown = {
        name: [(e.step, e.value) for e in board.Scalars(f"train/loss of {name}")] for name in ("a.jsonl", "b.jsonl")
    }
    assert shown["a.jsonl"] == [(n, 1.0 if n <= 4 else 2.0) for n in range(1, 9)]
    assert shown["b.jsonl"] == [(2, 11.0), (4, 11.0), (6, 12.0), (8, 12.0)]
    assert [e["source_loss"][0] for e in run.read_events()] == [1.0] * 4 + [2.0] * 4


def test_the_loader_says_whose_row_it_is(tmp_path):
    files = [write_rows(tmp_path / f"{n}.jsonl", (sentence(100 * n + i) for i in range(9))) for n in range(2)]
    data = section(tmp_path, [{"path": str(f), "weight": w} for f, w in zip(files, ("3", "1"), strict=True)])
    made = prepare(data, vocabulary=300, model_tokenizer=None, seed=0)
    found = [b for step in range(4) for b in Loader(made, 3, 0).micro_batches(step, rank=0, ranks=1, micro_batch=2)]
    for batch in found:
        assert batch.sources == [made.train.place(row)[0] if row >= 0 else -1 for row in batch.rows]
    assert {s for b in found for s in b.sources} == {-1, 0, 1}


def test_two_files_of_one_name_are_told_apart():
    assert source_names(["x/a.jsonl", "y/a.jsonl", "b", "package:p/c.py"]) == ["1 a.jsonl", "2 a.jsonl", "b", "c.py"]


def test_one_source_costs_nothing():
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 2), model=tiny_model())
    assert engine.step(Mixed().micro_batches(0, rank=0, ranks=1, micro_batch=2), 1e-2).by_source == ()


def test_a_mean_over_steps_is_of_sums():
    steps = [
        {"source_loss": [2.0, None], "source_weight": [30.0, 0.0]},
        {"source_loss": [4.0, 1.0], "source_weight": [10.0, 5.0]},
    ]
    assert mean_loss(steps, 0) == (2.5, 40.0)
    assert mean_loss(steps, 1) == (1.0, 5.0)
