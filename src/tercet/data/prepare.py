"""From a recipe's data section to packed rows on disk: check, tokenizer, tokens, packing, report. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tercet.data import cache, corpus, figures, tokenizer
from tercet.data.corpus import TRAIN, VALIDATION, Corpus, Tag
from tercet.data.kept import Kept, changes, described, judge
from tercet.data.losses import Losses
from tercet.data.mix import Mix, read_weights
from tercet.data.shards import Rows, Writer
from tercet.data.sources import Source, content_hashes, find_all
from tercet.data.tokenize import encode_stream
from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError
from tercet.spec.recipe import DataSection

FORMAT = 1
TOO_LONG, NO_TOKENS = "too long", "no tokens"
Progress = Callable[[int, int, str], None]
Say = Callable[[str], None]


def _quiet(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Prepared:
    """Data ready to be trained on, in `folder`, which is never changed again.

    `vocabulary` is the tokenizer's number of ids. `bos_id` is None when documents start without one; every
    document ends with `eos_id`. `report` can be written as JSON; see `figures.lines` for how it reads.
    """

    folder: Path
    key: str
    hit: bool
    report: dict[str, Any]
    train: Mix
    validation: Rows | None
    tokenizer_folder: Path
    vocabulary: int
    eos_id: int
    bos_id: int | None
    pad_id: int
    sequence_tokens: int
    decides: str  # hash of the tokenizer that the recipe names, or "train"
    files: dict[str, list[dict[str, Any]]]  # of the sources, with their contents' hashes (kept.described)


def prepare(
    data: DataSection,
    *,
    vocabulary: int | None,
    model_tokenizer: Path | None,
    seed: int,
    say: Say = _quiet,
    progress: Progress = _quiet,
    kept: Kept | None = None,
) -> Prepared:
    """Return the prepared data, made now or found in the cache under a key of all that decides it.

    `vocabulary`: the model's number of ids, which the tokenizer must not exceed (None: not checked; needed
    to train a tokenizer). `model_tokenizer`: the folder that data.tokenizer=model means. `seed` decides the
    order of the rows, not what they hold. `say` hears sentences, `progress` (bytes done, bytes in all,
    phase). `kept`: what the run that is resumed was begun with. Any number of processes may call this at the same time. Raises InputError for rows that cannot
    be used (with their places), a tokenizer that does not fit the model or cannot be had, or when nothing
    is left to train on.
    """
    _refuse_unbuilt(data)
    train, held = find_all(data)
    weights = read_weights([s.section.weight for s in train], [s.section.path for s in train])
    folder = cache.folder_of(data.cache)
    hashes = _hashes(train, held, progress)
    files = described(train, held, hashes)
    changed = changes(kept.files, files) if kept is not None else []
    if kept is not None and changed:
        say(judge(kept, changed, train, held, data.bad_rows))
    if kept is not None and not changed and (manifest := cache.complete(folder / kept.key)):
        key, hit, decided = kept.key, True, kept.tokenizer
    else:
        loaded, decided = _tokenizer_of(data, vocabulary, model_tokenizer, kept, say)
        decides = {"tokenizer": decided, **({"vocabulary": vocabulary} if loaded is None else {})}
        key = cache.key_of({**decides, **_settings(data, train, held, hashes)})

        def build(scratch: Path) -> dict[str, Any]:
            say(f"prepared data: miss, key {key}")
            return _build(data, train, held, loaded, vocabulary, scratch, progress, say)

        manifest, hit = cache.fill(folder, key, build, say)
    if hit:
        say(f"prepared data: hit, key {key}")
    figures.name_files(manifest["report"], train, held if isinstance(held, list) else [])
    for source in manifest["report"]["sources"]:
        for sentence in figures.warnings(source):
            say(sentence)
    found = _open(folder / key, key, hit, manifest, weights, seed, decided, files)
    _check_vocabulary(found.vocabulary, vocabulary, data.tokenizer)
    return found


def find_prepared(
    data: DataSection, *, vocabulary: int | None, model_tokenizer: Path | None, seed: int
) -> Prepared | None:
    """Return the data if it lies in the cache already, else None. Reads the files once, makes nothing."""
    train, held = find_all(data)
    weights = read_weights([s.section.weight for s in train], [s.section.path for s in train])
    hashes = _hashes(train, held, _quiet)
    loaded, decided = _tokenizer_of(data, vocabulary, model_tokenizer, None, _quiet)
    decides = {"tokenizer": decided, **({"vocabulary": vocabulary} if loaded is None else {})}
    key = cache.key_of({**decides, **_settings(data, train, held, hashes)})
    folder = cache.folder_of(data.cache) / key
    manifest = cache.complete(folder)
    if manifest is None:
        return None
    return _open(folder, key, True, manifest, weights, seed, decided, described(train, held, hashes))


def source_bytes(data: DataSection) -> dict[str, int]:
    """Return format -> bytes of the files of data.train."""
    found: Counter[str] = Counter()
    for source in find_all(data)[0]:
        for file in source.files:
            found[file.format] += file.bytes
    return dict(found)


def _refuse_unbuilt(data: DataSection) -> None:
    for name, value in (("template", data.template), ("train_on", data.train_on)):
        if value not in (None, "all"):
            raise InputError(f"data.{name} is {value!r}: training on chats is not built yet")


def _tokenizer_of(
    data: DataSection, vocabulary: int | None, model_tokenizer: Path | None, kept: Kept | None, say: Say
) -> tuple[Callable[[], Tokenizer] | None, str]:
    """Return (how to load the tokenizer, or None to train one; the hash of what of it decides the tokens, or "train").

    A run that has one of its own uses the recipe's only as long as it is the same.
    """
    if kept is not None and kept.tokenizer == "train":
        return _own(kept)
    if data.tokenizer == "train":
        if vocabulary is None:
            raise InputError("data.tokenizer is 'train', but model.vocabulary does not say how many ids it may have")
        return None, "train"
    try:
        load, content = _of_recipe(data, model_tokenizer)
    except InputError as error:
        if kept is None:
            raise
        say(f"{error.message}; the run's own tokenizer is used: {kept.own_tokenizer()}")
        return _own(kept)
    if kept is not None and content != kept.tokenizer:
        say(
            f"data.tokenizer {data.tokenizer} has changed since this run began; its own is used: {kept.own_tokenizer()}"
        )
        return _own(kept)
    return load, content


def _of_recipe(data: DataSection, model_tokenizer: Path | None) -> tuple[Callable[[], Tokenizer], str]:
    place = tokenizer.locate(data.tokenizer, model_tokenizer)
    content = tokenizer.content_hash(place)
    if content is not None:
        return lambda: tokenizer.load(place), content
    fetched = tokenizer.load(place)  # a hub name says nothing about its content, so it is loaded first
    return lambda: fetched, fetched.content()


def _own(kept: Kept) -> tuple[Callable[[], Tokenizer], str]:
    place = kept.own_tokenizer()
    return lambda: tokenizer.load(place), tokenizer.content_hash(place) or ""


def _hashes(train: list[Source], held: list[Source] | float | None, progress: Progress) -> list[str]:
    """Return the hash of each file's content, in the order of reading."""
    files = [f for s in [*train, *(held if isinstance(held, list) else [])] for f in s.files]
    total, done = sum(f.bytes for f in files), 0

    lock = Lock()

    def count(n: int) -> None:  # from several threads
        nonlocal done
        with lock:
            done += n
            progress(done, total, "hash")

    return content_hashes(files, count)


def _settings(
    data: DataSection, train: list[Source], held: list[Source] | float | None, content: list[str]
) -> dict[str, Any]:
    """Return what else decides the tokens: file contents (not names, not times) and settings."""
    groups = {"train": train, "validation": held if isinstance(held, list) else []}
    hashes = iter(content)
    described = {
        name: [{"map": s.section.map, "files": [(next(hashes), f.format) for f in s.files]} for s in sources]
        for name, sources in groups.items()
    }
    return {
        "format": FORMAT,
        "sources": described,
        "fraction": held if isinstance(held, float) else None,
        "sequence_tokens": data.sequence_tokens,
        "bad_rows": data.bad_rows,
        "long_rows": data.long_rows,
    }


def _build(
    data: DataSection,
    train: list[Source],
    held: list[Source] | float | None,
    load: Callable[[], Tokenizer] | None,
    vocabulary: int | None,
    folder: Path,
    progress: Progress,
    say: Say,
) -> dict[str, Any]:
    started = time.monotonic()
    total = sum(s.bytes for s in [*train, *(held if isinstance(held, list) else [])])
    checked = corpus.check(train, held, data.bad_rows, _Counter(progress, total, "check"))
    if load is None:
        assert vocabulary is not None
        say(f"training a tokenizer of at most {vocabulary} ids")
        meter = _Counter(progress, checked.findings["train"].characters, "train tokenizer")
        words = tokenizer.train(meter.through(p.text for p in checked.documents(TRAIN)), vocabulary)
    else:
        words = load()
        _check_vocabulary(words.size, vocabulary, data.tokenizer)
    words.save(folder / "tokenizer")
    names = [f"train-{n}" for n in range(len(train))]
    characters = sum(f.characters for f in checked.findings.values())
    work = _Encoding(checked, words, data, folder, _Counter(progress, characters, "tokenize"))
    writers = work.train(names)
    validation = work.validation()
    sets = [w.finish() for w in writers]
    held_out = validation.finish() if validation is not None else None
    work.losses.refuse([s.name for s in [*checked.train, *checked.validation]], data.tokenizer)
    work.complain(sets, held_out)
    losses = [work.losses.figures(n) for n in range(len(train))]
    report = figures.report(checked, writers, sets, validation, held_out, work.characters, data.sequence_tokens, losses)
    report["seconds"] = round(time.monotonic() - started, 3)
    report["tokenizer"] = {"name": data.tokenizer, "vocabulary": words.size}
    return {
        "format": FORMAT,
        "report": report,
        "sequence_tokens": data.sequence_tokens,
        "dtype": str(sets[0].dtype),
        "train": names,
        "validation": held_out.name if held_out else None,
        "vocabulary": words.size,
        "eos_id": words.eos_id,
        "bos_id": words.bos_id,
        "pad_id": words.pad_id,
    }


class _Counter:
    """Adds up what is done and reports it under one phase."""

    def __init__(self, progress: Progress, total: int, phase: str):
        self.progress, self.total, self.phase, self.done = progress, total, phase, 0

    def __call__(self, n: int) -> None:
        self.done += n
        self.progress(min(self.done, self.total), self.total, self.phase)

    def through(self, texts: Any) -> Any:
        for text in texts:
            yield text
            self(len(text))


class _Encoding:
    """Tokenises the checked documents into writers and applies the rule for long ones."""

    def __init__(self, checked: Corpus, words: Tokenizer, data: DataSection, folder: Path, meter: _Counter):
        self.checked, self.words, self.data, self.folder, self.meter = checked, words, data, folder, meter
        self.characters = {TRAIN: 0, VALIDATION: 0}
        self.losses = Losses(words, len(checked.train) + len(checked.validation))

    def _writer(self, name: str) -> Writer:
        return Writer(self.folder, name, self.data.sequence_tokens, self.words.dtype)

    def train(self, names: Sequence[str]) -> list[Writer]:
        writers = [self._writer(n) for n in names]
        self._encode(TRAIN, writers, "train")
        return writers

    def validation(self) -> Writer | None:
        """Tokenise what is held out: all its sources make one set."""
        if self.checked.fraction is None and not self.checked.validation:
            return None
        writer = self._writer("validation")
        sources = len(self.checked.train) + len(self.checked.validation)
        self._encode(VALIDATION, [writer] * sources, "train" if self.checked.fraction else "validation")
        return writer

    def _encode(self, side: int, writers: list[Writer], name: str) -> None:
        findings = self.checked.findings[name]
        start, end = self.words.before, self.words.after
        empty = True
        for piece in encode_stream(self.words, self._watched(side), characters=findings.characters):
            tag: Tag = piece.tag
            writer = writers[tag.source]
            if piece.first:
                empty = True
                # A text that goes on behind a held-out section does not begin or end there.
                if piece.opening.begins:
                    writer.append(start)
            empty = empty and piece.ids.size == 0
            self.losses.ids(tag.source, piece.ids)
            writer.append(piece.ids)
            if not piece.last:
                continue
            if empty:
                writer.abandon()
                self._drop(findings, side, NO_TOKENS, tag)
                continue
            if tag.ends:
                writer.append(end)
            befell = writer.end("split" if tag.stream else self.data.long_rows)
            if befell == "drop":
                self._drop(findings, side, TOO_LONG, tag)
            elif befell is not None and not tag.stream:
                findings.seen[f"long rows {befell}"] += 1

    def _watched(self, side: int) -> Any:
        for part in self.checked.documents(side):
            self.characters[side] += len(part.text)
            self.losses.text(part.tag.source, part.text)
            self.meter(len(part.text))
            yield part

    def _drop(self, findings: corpus.Findings, side: int, reason: str, tag: Tag) -> None:
        findings.drop(reason, f"{tag.file.name}, line {tag.line}, column 1")
        findings.kept -= 1
        self.checked.late[side] += 1

    def complain(self, sets: list[Rows], held_out: Rows | None) -> None:
        """Raise InputError when a side came out empty, or rows gave no tokens and bad rows are to stop."""
        dropped = sum((f.dropped for f in self.checked.findings.values()), Counter())
        places = [p for f in self.checked.findings.values() for p in f.places.get(NO_TOKENS, [])]
        if dropped[NO_TOKENS] and self.data.bad_rows == "stop":
            raise InputError(
                f"{dropped[NO_TOKENS]} rows cannot be used: the tokenizer makes nothing of their text\n"
                + "\n".join(places),
                "Set data.bad_rows=skip to leave them out.",
            )
        length = self.data.sequence_tokens
        hint = f"Rows over data.sequence_tokens ({length}) are dropped unless data.long_rows is cut or split."
        for key, empty in (
            ("train", not any(map(len, sets))),
            ("validation", held_out is not None and not len(held_out)),
        ):
            if empty:
                reasons = corpus.counted(dropped)
                raise InputError(
                    f"data.{key}: no row is left (dropped: {reasons})", hint if dropped[TOO_LONG] else None
                )


def _check_vocabulary(size: int, vocabulary: int | None, name: str) -> None:
    if vocabulary is not None and size > vocabulary:
        raise InputError(
            f"the tokenizer ({name}) has {size} ids, but model.vocabulary is {vocabulary}",
            f"Set model.vocabulary to at least {size}, or take another tokenizer.",
        )


def _open(
    folder: Path,
    key: str,
    hit: bool,
    manifest: dict[str, Any],
    weights: tuple[float, ...] | None,
    seed: int,
    decides: str,
    files: dict[str, list[dict[str, Any]]],
) -> Prepared:
    def rows(name: str) -> Rows:
        return Rows(folder, name, manifest["sequence_tokens"], manifest["dtype"])

    sources = tuple(rows(n) for n in manifest["train"])
    report = manifest["report"]
    if weights and (empty := [n for n, s in zip(report["sources"], sources, strict=True) if not len(s)]):
        raise InputError(f"data.train: {empty[0]['path']} has a weight, but no row of it is left to train on")
    mix = Mix(sources, weights, seed)
    figures.add_shares(report, mix)
    return Prepared(
        folder=folder,
        key=key,
        hit=hit,
        report=report,
        train=mix,
        validation=rows(manifest["validation"]) if manifest["validation"] else None,
        tokenizer_folder=folder / "tokenizer",
        vocabulary=manifest["vocabulary"],
        eos_id=manifest["eos_id"],
        bos_id=manifest["bos_id"],
        pad_id=manifest["pad_id"],
        sequence_tokens=manifest["sequence_tokens"],
        decides=decides,
        files=files,
    )
