"""D11: streamed sets. The place of any row follows from its number; resuming prepares one part, wherever it is."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from tercet.data import prepare as preparing
from tercet.data import stream
from tercet.data.loader import Loader
from tercet.data.prepare import prepare
from tercet.errors import InputError
from tests.chats_tiny import folder as words_folder
from tests.chats_tiny import turns, words
from tests.texts import section, sentence, write_rows

LINES = 240


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(stream, "PART_BYTES", 2_400)
    monkeypatch.setattr(preparing, "PART_BYTES", 2_400)


@pytest.fixture
def no_helpers(monkeypatch):
    monkeypatch.setattr(stream, "_start", lambda *_: None)


def opened(folder, data=None, say=lambda text: None, **keys):
    if data is None:
        file = folder / "rows.jsonl"
        if not file.exists():
            write_rows(file, (sentence(n, 5) for n in range(LINES)))
        data = str(file)
    words().save(folder / "words")
    made = section(
        folder, data, tokenizer=str(folder / "words"), stream=True, long_rows="drop", sequence_tokens=64, **keys
    )
    return prepare(made, vocabulary=None, model_tokenizer=None, seed=0, say=say)


def texts_of(made, batches):
    """The documents of batches, decoded, in order."""
    tokenizer = words()
    found = []
    for batch in batches:
        ids = batch.input_ids.flatten().tolist()
        borders = batch.documents.tolist()
        for begin, end in pairwise(borders):
            text = tokenizer.decode(i for i in ids[begin:end] if i not in (made.pad_id, made.eos_id))
            if text:
                found.append(text)
    return found


def epoch_rows(made) -> int:
    """Rows of one epoch, counted by preparing every part."""
    streams = made.stream.seeded(0)._streams
    for one in streams:
        one.place(0, False)
        while len(one.ends) < len(made.stream.sources[one.source]):
            one.place(one.ends[-1], False)
    return sum(one.ends[-1] for one in streams)


def test_every_row_once_over_parts_and_ranks(tmp_path, small_parts, no_helpers, monkeypatch):
    monkeypatch.setattr(stream, "KEPT_PARTS", 99)  # each part is prepared once for the three layouts
    made = opened(tmp_path)
    assert len(made.stream.sources[0]) > 5
    count = epoch_rows(made)
    for ranks, micro in ((1, 4), (2, 1), (3, 2)):
        loaders = [Loader(made, 1, 0) for _ in range(ranks)]
        seen = Counter()
        for step in range(count):
            for rank, loader in enumerate(loaders):
                batches = loader.micro_batches(step, rank=rank, ranks=ranks, micro_batch=micro)
                seen.update(texts_of(made, [b for b in batches if max(b.rows) >= 0]))
        assert seen == Counter(sentence(n, 5) for n in range(LINES)), (ranks, micro)


def test_resuming_prepares_one_part_and_goes_on_with_the_next_row(tmp_path, small_parts, no_helpers, monkeypatch):
    """Counted: rows that are tokenised again, in place of a tokenizer that sleeps."""
    monkeypatch.setattr(stream, "KEPT_PARTS", 1)
    made = opened(tmp_path)
    through = Loader(made, 2, 0)
    whole = [texts_of(made, through.micro_batches(step, rank=0, ranks=1, micro_batch=2)) for step in range(40)]
    on_disk = list((made.folder.parent / f"stream-{made.key}").glob("0-*/"))
    assert len(on_disk) <= 3 < 5 < len(through.mix._streams[0].ends), "few parts stay on the disk"
    parts = []
    take = preparing.build_part
    monkeypatch.setattr(preparing, "build_part", lambda *a: parts.append(a[1].files[0].begin) or take(*a))
    said = []
    resumed = Loader(opened(tmp_path, say=said.append), 2, 0)
    assert texts_of(made, resumed.micro_batches(30, rank=0, ranks=1, micro_batch=2)) == whole[30]
    assert len(parts) <= 1
    assert [texts_of(made, resumed.micro_batches(s, rank=0, ranks=1, micro_batch=2)) for s in range(31, 40)] == whole[
        31:
    ]
    assert not any("again" in text for text in said)


@pytest.mark.slow
def test_a_replay_is_said(tmp_path, small_parts, no_helpers):
    made = opened(tmp_path)
    before = texts_of(made, Loader(made, 2, 0).micro_batches(30, rank=0, ranks=1, micro_batch=2))
    (made.folder.parent / f"stream-{made.key}" / stream.COUNTS).unlink()
    said = []
    again = Loader(opened(tmp_path, say=said.append), 2, 0)
    assert texts_of(made, again.micro_batches(30, rank=0, ranks=1, micro_batch=2)) == before
    assert [text for text in said if "prepared again" in text] and len(said) < 10


@pytest.mark.slow
def test_a_helper_prepares_the_next_part(tmp_path, small_parts):
    made = opened(tmp_path)
    loader = Loader(made, 1, 0)
    loader.micro_batches(0, rank=0, ranks=1, micro_batch=1)
    one = loader.mix._streams[0]
    assert one.helper is not None and one.helper.wait(120) == 0
    part = one.part_at(1)
    assert (one.builder.folder / f"0-{part:06d}" / "manifest.json").is_file()


def test_sources_share_by_bytes_or_by_weight(tmp_path, small_parts, no_helpers):
    files = [
        write_rows(tmp_path / f"{n}.jsonl", (sentence(1000 * n + i, 5) for i in range(c)))
        for n, c in ((1, 200), (2, 100))
    ]
    made = opened(tmp_path, [str(f) for f in files])
    owners = [made.stream.rows_at(n)[0] for n in range(30)]
    assert owners.count(0) == 20
    weighted = opened(tmp_path, [{"path": str(f), "weight": w} for f, w in zip(files, ("1", "4"), strict=True)])
    assert [weighted.stream.rows_at(n)[0] for n in range(30)].count(1) == 24


def test_chats_are_streamed_with_their_masks(tmp_path, small_parts, no_helpers):
    file = tmp_path / "chats.jsonl"
    rows = ({"messages": turns(sentence(n, 4), sentence(n + 500, 4))} for n in range(60))
    file.write_text("\n".join(json.dumps(r) for r in rows))
    data = section(
        tmp_path, str(file), tokenizer=words_folder(tmp_path / "t"), template="chatml", stream=True, sequence_tokens=128
    )
    made = prepare(data, vocabulary=None, model_tokenizer=None, seed=0)
    loader = Loader(made, 2, 0)
    for batch in loader.micro_batches(5, rank=0, ranks=1, micro_batch=2):
        assert 0 < batch.trained_tokens < int((batch.input_ids != made.pad_id).sum())


@pytest.mark.slow
def test_parquet_is_cut_at_row_groups(tmp_path, small_parts, no_helpers):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = arrow.table({"text": [sentence(n, 5) for n in range(300)]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=20, compression="none")
    made = opened(tmp_path, str(tmp_path / "rows.parquet"))
    assert 3 < len(made.stream.sources[0]) <= 15
    count, loader = epoch_rows(made), Loader(made, 1, 0)
    seen = [t for s in range(count) for t in texts_of(made, loader.micro_batches(s, rank=0, ranks=1, micro_batch=1))]
    assert Counter(seen) == Counter(sentence(n, 5) for n in range(300))


def test_a_line_belongs_to_one_part(tmp_path):
    from tercet.data.formats.jsonl import read_range
    from tercet.data.rows import Reading

    lines = [json.dumps({"text": "x" * n}).encode() for n in (1, 30, 2, 2, 100, 5, 1)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    size = file.stat().st_size
    for cut in range(1, size):
        found = [len(r.text) for a, b in ((0, cut), (cut, size)) for r in read_range(file, Reading(), a, b)]
        assert found == [1, 30, 2, 2, 100, 5, 1], cut


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"tokenizer": "train"}, "tokenizer=train"),
        ({"validation": "0.1"}, "validation as a fraction"),
        ({"temperature": "2"}, "temperature"),
    ],
)
def test_what_needs_the_whole_set_is_refused(tmp_path, keys, word):
    file = write_rows(tmp_path / "rows.jsonl", [sentence(1)])
    data = section(tmp_path, str(file), **{"tokenizer": "nowhere", "stream": True, **keys})
    with pytest.raises(InputError, match=word):
        prepare(data, vocabulary=300, model_tokenizer=None, seed=0)


def test_a_part_that_another_run_drops_is_prepared_again(tmp_path, small_parts, no_helpers, monkeypatch):
    made = opened(tmp_path)
    fill, calls = stream.cache.fill, []

    def and_dropped_at_once(*arguments):
        found = fill(*arguments)
        calls.append(arguments[1])
        if len(calls) == 1:  # between what one run finds and what it opens
            made.stream.builder.drop(0, 0)
        return found

    monkeypatch.setattr(stream.cache, "fill", and_dropped_at_once)
    rows = made.stream.builder.rows(0, 0, lambda text: None)
    assert len(calls) == 2 and len(rows) > 0
    made.stream.builder.drop(0, 0)
    made.stream.builder.drop(0, 0)  # the other run's
    assert len(rows.row(0)[0]) > 0  # open ones are read on
