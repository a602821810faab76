"""prepare() as a whole: rows counted to the last, sides divided, long rows, weights, plain text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from tests.texts import documents, made, sentence, write_rows

from tercet.data import tokenizer
from tercet.data.figures import lines
from tercet.data.loader import Loader
from tercet.errors import InputError, TercetError


def words_of(prepared):
    return tokenizer.load(prepared.tokenizer_folder / "tokenizer.json")


def held_out(prepared):
    found = []
    for n in range(len(prepared.validation)):
        ids, lengths = prepared.validation.row(n)
        at = 0
        for length in lengths:
            found.append(ids[at : at + length].tolist())
            at += length
    return sorted(found)


def test_rows_in_are_rows_used_and_rows_dropped(tmp_path):
    """B26: empty rows of every kind are counted and listed."""
    path = tmp_path / "rows.jsonl"
    rows = [sentence(1), "", "   ", None, 5, sentence(2, 200), "🙂", sentence(3), "\n\t", sentence(2)]
    path.write_text("".join(json.dumps({"text": r}) + "\n" for r in rows))
    prepared = made(tmp_path, path, bad_rows="skip", long_rows="drop", sequence_tokens=128)
    report = prepared.report
    counts = report["rows"]
    dropped = {r: d["rows"] for r, d in report["dropped"]["train"].items()}
    assert counts == {"read": 10, "train": 4, "validation": 0, "dropped": 6}
    assert dropped == {"empty text": 3, "null text": 1, "wrong type": 1, "too long": 1}
    assert report["dropped"]["train"]["too long"]["places"] == [f"{path}, line 6, column 1"]
    assert report["dropped"]["train"]["empty text"]["places"] == [
        f"{path}, line 2, column 10",
        f"{path}, line 3, column 10",
        f"{path}, line 9, column 10",
    ]
    text = "\n".join(lines(report))
    assert "10 read = 4 to train + 0 held out + 6 dropped" in text and "line 9, column 10" in text
    assert report["tokens"]["train"] == sum(map(len, documents(prepared)))
    assert report["characters"]["train"] == sum(len(rows[n]) for n in (0, 5, 6, 7, 9))
    assert report["lengths"]["longer_than_a_row"] == 1


def test_a_text_of_which_nothing_is_left(tmp_path):
    """A tokenizer without the byte alphabet that maps a text to nothing."""
    backend = json.loads(tokenizer.train(iter(["ab"]), 259).backend.to_str())
    backend["normalizer"] = {"type": "Replace", "pattern": {"String": "🙂"}, "content": ""}
    (tmp_path / "words.json").write_text(json.dumps(backend))
    path = write_rows(tmp_path / "rows.jsonl", ["ab ab", "🙂🙂", "ba"])
    keys = {"tokenizer": str(tmp_path / "words.json")}
    with pytest.raises(InputError, match=r"1 rows cannot be used: .* nothing of their text\n.*line 2"):
        made(tmp_path, path, **keys)
    prepared = made(tmp_path, path, bad_rows="skip", **keys)
    assert prepared.report["rows"] == {"read": 3, "train": 2, "validation": 0, "dropped": 1}
    assert documents(prepared) == sorted(words_of(prepared).document(t) for t in ("ab ab", "ba"))


def test_a_fraction_divides_by_content(tmp_path):
    """B24: equal texts land on one side, whatever their file; the sides have nothing in common."""
    texts = [sentence(n % 80) for n in range(100)]  # 20 of 100 repeat an earlier one
    one = made(tmp_path, write_rows(tmp_path / "a.jsonl", texts), validation=0.2, sequence_tokens=128)
    train, held = documents(one), held_out(one)
    assert not {tuple(d) for d in train} & {tuple(d) for d in held}
    assert len({tuple(d) for d in held}) == 16  # a fifth of the 80 different ones
    assert (one.report["duplicates"], one.report["overlap"]) == (20, 0)
    assert one.report["rows"]["train"] + one.report["rows"]["validation"] == 100
    assert len(held) == one.report["rows"]["validation"]
    again = made(tmp_path, write_rows(tmp_path / "b.jsonl", texts[::-1]), validation=0.2, sequence_tokens=128)
    both = [sorted(words_of(p).decode(i) for i in held_out(p)) for p in (one, again)]
    assert both[0] == both[1]


def test_the_tokenizer_never_sees_what_is_held_out(tmp_path):
    texts = [sentence(n) for n in range(40)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    with_held = made(tmp_path, path, validation=0.3, vocabulary=320, sequence_tokens=256)
    kept = [words_of(with_held).decode(d[1:-1]) for d in documents(with_held)]
    assert tokenizer.train(iter(t for t in texts if t in kept), 320).content() == words_of(with_held).content()


def test_overlap_of_given_files_is_counted(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [sentence(n) for n in range(50)])
    held = write_rows(tmp_path / "held.jsonl", [sentence(n) for n in (3, 7, 7, 100, 101)])
    prepared = made(tmp_path, train, validation=str(held))
    assert prepared.report["overlap"] == 3
    assert prepared.report["rows"] == {"read": 55, "train": 50, "validation": 5, "dropped": 0}


@pytest.mark.parametrize("rule", ["drop", "cut", "split"])
def test_long_rows(tmp_path, rule):
    texts = [sentence(1, 3), sentence(2, 60), sentence(3, 3)]
    path, said = write_rows(tmp_path / "rows.jsonl", texts), []
    prepared = made(tmp_path, path, vocabulary=259, say=said.append, long_rows=rule, sequence_tokens=64)
    whole = [words_of(prepared).document(t) for t in texts]
    short = [d for d in whole if len(d) <= 64]
    long = next(d for d in whole if len(d) > 64)
    pieces = {"drop": [], "cut": [long[:64]], "split": [long[n : n + 64] for n in range(0, len(long), 64)]}[rule]
    assert documents(prepared) == sorted(short + pieces)
    seen = prepared.report["seen"]
    assert seen == ({} if rule == "drop" else {f"long rows {rule}": 1})
    # What is left out is said whoever prepares, with its share of what would be trained.
    left = {"drop": len(long) - 1, "cut": len(long) - 64, "split": 0}[rule]
    every = sum(len(d) - 1 for d in whole)
    told = [text for text in said if text.startswith("long rows")]
    assert [f"({left} of {every} tokens)" in text for text in told] == ([] if rule == "split" else [True])


@pytest.mark.parametrize("rule", ["drop", "split"])
def test_plain_text_is_one_stream_and_always_split(tmp_path, rule):
    path = tmp_path / "book.txt"
    text = "\n\n".join(sentence(n, 30) for n in range(40))
    path.write_text(text)
    prepared = made(tmp_path, path, long_rows=rule, sequence_tokens=64)
    source = prepared.train.sources[0]
    ids = [i for n in range(len(source)) for i in source.row(n)[0].tolist()]
    assert ids == words_of(prepared).document(text)
    assert all(len(source.row(n)[0]) == 64 for n in range(len(source) - 1))
    assert prepared.report["rows"] == {"read": 1, "train": 1, "validation": 0, "dropped": 0}


def test_a_fraction_of_plain_text_is_held_out_in_sections(tmp_path):
    path = tmp_path / "book.txt"
    text = "\n\n".join(sentence(n, 40) for n in range(600))
    path.write_text(text)
    prepared = made(tmp_path, path, validation=0.1, sequence_tokens=256)
    assert 0.05 < prepared.report["characters"]["validation"] / len(text) < 0.15
    assert sum(prepared.report["characters"].values()) == len(text)
    words = words_of(prepared)
    ends = [words.decode(d) for d in documents(prepared) + held_out(prepared)]
    assert sum(words.backend.id_to_token(words.eos_id) in t for t in ends) == 1  # the file ends once
    assert sum(t.startswith("<|begin_of_text|>") for t in ends) == 1
    assert sum(len(t) for t in ends) == len(text) + len("<|begin_of_text|><|end_of_text|>")


def test_weights_are_the_share_of_the_trained_sequences(tmp_path):
    small = write_rows(tmp_path / "small.jsonl", [sentence(n, 14) for n in range(3)])
    large = write_rows(tmp_path / "large.jsonl", [sentence(100 + n, 14) for n in range(40)])
    sources = [{"path": str(small), "weight": 1}, {"path": str(large), "weight": 3}]
    prepared = made(tmp_path, sources, vocabulary=259, sequence_tokens=128, long_rows="drop")
    loader = Loader(prepared, 8, 0)
    first = {tuple(prepared.train.sources[0].row(n)[0].tolist()) for n in range(3)}
    used = Counter()
    for step in range(10):
        (batch,) = loader.micro_batches(step, rank=0, ranks=1, micro_batch=8)
        for ids in batch.input_ids.tolist():
            used[any(tuple(ids[: len(f)]) == f for f in first)] += 1
    assert used == {True: 20, False: 60}
    shares = [(s["share"], s["repeats_per_epoch"]) for s in prepared.report["sources"]]
    assert shares == [(0.25, pytest.approx(0.25 * 43 / 3, abs=1e-3)), (0.75, pytest.approx(0.75 * 43 / 40, abs=1e-3))]
    with pytest.raises(InputError, match=r"large\.jsonl has no weight"):
        made(tmp_path, [sources[0], str(large)])


def test_several_sources_without_weights_train_every_row_once(tmp_path):
    paths = [
        str(write_rows(tmp_path / f"{k}.jsonl", [sentence(100 * k + n, 14) for n in range(3 + k)])) for k in range(3)
    ]
    prepared = made(tmp_path, paths, vocabulary=259, sequence_tokens=128, long_rows="drop")
    assert prepared.train.rows_per_epoch == 12
    assert len({prepared.train.place(n) for n in range(12)}) == 12
    assert prepared.validation is None
    assert list(Loader(prepared, 2, 0).evaluation(rank=0, ranks=1, micro_batch=2)) == []


def test_a_large_file_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch):
    from tercet.data import corpus
    from tercet.data.sources import find
    from tercet.spec.recipe import SourceSection

    monkeypatch.setattr(corpus, "KEPT_BYTES", 0)
    path = write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(5)])
    checked = corpus.check([find(SourceSection(path=str(path)), "data.train.0")], None, "stop")
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(TercetError, match="changed while it was being read"):
        list(checked.documents(corpus.TRAIN))


def test_what_is_read_once_and_what_is_read_again_give_the_same(tmp_path, monkeypatch):
    from tercet.data import corpus

    rows = write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(40)])
    text = tmp_path / "book.txt"
    text.write_text("\n\n".join(sentence(n, 60) for n in range(50)), encoding="utf-8")
    found = []
    for limit in (0, 1 << 20):
        monkeypatch.setattr(corpus, "KEPT_BYTES", limit)
        options = {"vocabulary": 300, "sequence_tokens": 64, "long_rows": "split", "validation": 0.2}
        prepared = made(tmp_path, [str(rows), str(text)], cache=str(tmp_path / f"cache-{limit}"), **options)
        found.append((sorted(documents(prepared)), held_out(prepared)))
    assert found[0] == found[1] and len(found[0][0]) > 40


def test_progress_and_phases(tmp_path):
    from tests.texts import section

    from tercet.data.prepare import prepare

    path = write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(50)])
    seen = {}
    prepare(
        section(tmp_path, path),
        vocabulary=300,
        model_tokenizer=None,
        seed=0,
        progress=lambda done, total, phase: seen.setdefault(phase, []).append((done, total)),
    )
    assert list(seen) == ["hash", "check", "train tokenizer", "tokenize"]
    for steps in seen.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_preparing_loads_no_torch(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sentence(n) for n in range(20)])
    program = (
        "import sys\nfrom tests.texts import made\nfrom pathlib import Path\n"
        f"made(Path({str(tmp_path)!r}), Path({str(path)!r}))\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_keys_of_chats_without_a_chat_are_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sentence(1)])
    for key, value in (("template", "chatml"), ("train_on", "assistant")):
        with pytest.raises(InputError, match=f"data.{key} is {value}, but no row of the data is a chat"):
            made(tmp_path, path, **{key: value})


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    import errno

    from tercet.data.shards import Writer

    def full(self, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "_write", full)
    path = write_rows(tmp_path / "rows.jsonl", [sentence(1)])
    with pytest.raises(TercetError, match="the disk is full"):
        made(tmp_path, path)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.undo()
    assert not made(tmp_path, path).hit


def test_tokens_of_more_than_sixteen_bits(tmp_path):
    backend = json.loads(tokenizer.train(iter(["ab"]), 259).backend.to_str())
    backend["added_tokens"].append({**backend["added_tokens"][0], "id": 70_000, "content": "zebra", "special": False})
    backend["model"]["vocab"]["zebra"] = 70_000
    (tmp_path / "words.json").write_text(json.dumps(backend))
    path = write_rows(tmp_path / "rows.jsonl", ["a zebra b"])
    prepared = made(tmp_path, path, tokenizer=str(tmp_path / "words.json"), vocabulary=70_001)
    assert 70_000 in documents(prepared)[0]
    assert prepared.train.sources[0].row(0)[0].dtype == "uint32"
