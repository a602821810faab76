"""From a recipe's data section to packed rows on disk: check, tokenizer, tokens, packing, report. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from tercet.data import cache, corpus, figures, long, tokenizer
from tercet.data.control import tokens_of
from tercet.data.corpus import TRAIN
from tercet.data.encoding import Encoding, Meter, Progress
from tercet.data.kept import RunData, changes, described, judge
from tercet.data.mix import Mix, Mixing
from tercet.data.parts import entered_in_the_middle, fingerprints
from tercet.data.shards import Rows
from tercet.data.sources import Source, content_hashes, find_all
from tercet.data.spans import Template
from tercet.data.stream import PART_BYTES, Builder, StreamMix, cut_all
from tercet.data.template import find_template, source_of
from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError
from tercet.spec.recipe import DataSection
from tercet.units import show_bytes

FORMAT = 1
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
    stop_ids: tuple[int, ...]  # eos_id, and what ends an answer in a chat
    pad_id: int
    sequence_tokens: int
    decides: str  # hash of the tokenizer that the recipe names, or "train"
    files: dict[str, list[dict[str, Any]]]  # of the sources, with their contents' hashes (kept.described)
    stream: StreamMix | None = None  # what is trained, where `train` is but the beginning of it


def prepare(
    data: DataSection,
    *,
    vocabulary: int | None,
    model_tokenizer: Path | None,
    seed: int,
    say: Say = _quiet,
    progress: Progress = _quiet,
    kept: RunData | None = None,
) -> Prepared:
    """Return the prepared data, made now or found in the cache under a key of all that decides it.

    `vocabulary`: the model's number of ids, which the tokenizer must not exceed (None: not checked; needed
    to train a tokenizer). `model_tokenizer`: the folder that data.tokenizer=model means. `seed` decides the
    order of the rows, not what they hold. `say` hears sentences, `progress` (bytes done, bytes in all,
    phase). `kept`: what the run that is resumed was begun with. Any number of processes may call this at the same time. Raises InputError for rows that cannot
    be used (with their places), a tokenizer that does not fit the model or cannot be had, or when nothing
    is left to train on.
    """
    train, held = find_all(data)
    mixing = Mixing.of(data)
    folder = cache.folder_of(data.cache)
    hashes = _hashes(data, train, held, progress)
    files = described(train, held, hashes)
    parts = cut_all(train) if data.stream else []
    first = [p[0] for p in parts] if data.stream else train
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
            return _build(data, first, held, loaded, vocabulary, scratch, progress, say)

        manifest, hit = cache.fill(folder, key, build, say)
    if hit:
        say(f"prepared data: hit, key {key}")
    figures.name_files(manifest["report"], first, held if isinstance(held, list) else [])
    for source in manifest["report"]["sources"]:
        for sentence in figures.warnings(source):
            say(sentence)
    report = manifest["report"]
    if long_rows := long.said(report.get("long_rows"), report["trained_tokens"]["train"], data.sequence_tokens):
        say(long_rows)
    found = _open(folder / key, key, hit, manifest, mixing, seed, decided, files)
    _check_vocabulary(found.vocabulary, vocabulary, data.tokenizer)
    if data.stream:
        say(stream_sentence(parts))
        builder = Builder(data, parts, found.tokenizer_folder, folder / f"stream-{key}")
        found = replace(found, stream=StreamMix(builder, mixing.weights, seed, say))
    return found


def build_part(data: DataSection, part: Source, words: Path, scratch: Path) -> dict[str, Any]:
    """Prepare one part of a stream into `scratch`; `words` is the tokenizer's folder. Return the manifest."""
    data = data.model_copy(update={"validation": None})

    def load() -> Tokenizer:
        return tokenizer.load(words / "tokenizer.json")

    return _build(data, [part], None, load, None, scratch, _quiet, _quiet, whole=False)


def find_prepared(
    data: DataSection, *, vocabulary: int | None, model_tokenizer: Path | None, seed: int
) -> Prepared | None:
    """Return the data if it lies in the cache already, else None. Reads the files once, makes nothing."""
    train, held = find_all(data)
    mixing = Mixing.of(data)
    hashes = _hashes(data, train, held, _quiet)
    loaded, decided = _tokenizer_of(data, vocabulary, model_tokenizer, None, _quiet)
    decides = {"tokenizer": decided, **({"vocabulary": vocabulary} if loaded is None else {})}
    key = cache.key_of({**decides, **_settings(data, train, held, hashes)})
    folder = cache.folder_of(data.cache) / key
    manifest = cache.complete(folder)
    if manifest is None:
        return None
    return _open(folder, key, True, manifest, mixing, seed, decided, described(train, held, hashes))


def source_bytes(data: DataSection) -> dict[str, int]:
    """Return format -> bytes of the files of data.train."""
    found: Counter[str] = Counter()
    for source in find_all(data)[0]:
        for file in source.files:
            found[file.format] += file.bytes
    return dict(found)


def _tokenizer_of(
    data: DataSection, vocabulary: int | None, model_tokenizer: Path | None, kept: RunData | None, say: Say
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


def _own(kept: RunData) -> tuple[Callable[[], Tokenizer], str]:
    place = kept.own_tokenizer()
    return lambda: tokenizer.load(place), tokenizer.content_hash(place) or ""


def _hashes(data: DataSection, train: list[Source], held: list[Source] | float | None, progress: Progress) -> list[str]:
    """Return the hash of each file's content, in the order of reading; of what is streamed, of samples of it."""
    files = [f for s in [*train, *(held if isinstance(held, list) else [])] for f in s.files]
    if data.stream:
        return fingerprints(files)
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
        name: [
            {"map": s.section.map, "rows": s.section.format, "files": [(next(hashes), f.format) for f in s.files]}
            for s in sources
        ]
        for name, sources in groups.items()
    }
    return {
        "format": FORMAT,
        "sources": described,
        "fraction": held if isinstance(held, float) else None,
        "sequence_tokens": data.sequence_tokens,
        "bad_rows": data.bad_rows,
        "long_rows": data.long_rows,
        "template": None if data.template is None else source_of(data.template, Path())[1],
        "train_on": data.train_on,
        **({"stream": PART_BYTES} if data.stream else {}),
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
    whole: bool = True,
) -> dict[str, Any]:
    started = time.monotonic()
    total = sum(s.bytes for s in [*train, *(held if isinstance(held, list) else [])])
    checked = corpus.check(train, held, data.bad_rows, Meter(progress, total, "check"))
    chats = checked.chats
    if whole and not chats and (data.template is not None or data.train_on not in (None, "all")):
        key = "template" if data.template is not None else "train_on"
        raise InputError(f"data.{key} is {getattr(data, key)}, but no row of the data is a chat", "Take it out.")
    if load is None:
        assert vocabulary is not None
        say(f"training a tokenizer of at most {vocabulary} ids")
        meter = Meter(progress, checked.findings["train"].characters, "train tokenizer")
        marks = tokens_of(data.template) if chats else ()
        words = tokenizer.train(meter.through(checked.words(TRAIN)), vocabulary, marks)
    else:
        words = load()
        _check_vocabulary(words.size, vocabulary, data.tokenizer)
    words.save(folder / "tokenizer")
    template = _template_of(data, words, folder / "tokenizer") if chats else None
    names = [f"train-{n}" for n in range(len(train))]
    characters = sum(f.characters for f in checked.findings.values())
    work = Encoding(checked, words, template, data, folder, Meter(progress, characters, "tokenize"))
    writers = work.train(names)
    validation = work.validation()
    sets = [w.finish() for w in writers]
    held_out = validation.finish() if validation is not None else None
    work.losses.refuse([s.name for s in [*checked.train, *checked.validation]], data.tokenizer)
    work.complain(sets, held_out)
    losses = [work.losses.figures(n) for n in range(len(train))]
    report = figures.report(checked, writers, sets, validation, held_out, work.characters, data.sequence_tokens, losses)
    report["long_rows"] = work.long.figures(data.long_rows)
    report["seconds"] = round(time.monotonic() - started, 3)
    report["tokenizer"] = {"name": data.tokenizer, "vocabulary": words.size}
    if template is not None:
        report["chats"] = work.chat_figures(template)
    return {
        "format": FORMAT,
        "report": report,
        "sequence_tokens": data.sequence_tokens,
        "dtype": str(sets[0].dtype),
        "train": names,
        "validation": held_out.name if held_out else None,
        "vocabulary": words.size,
        "eos_id": words.eos_id,
        "stop_ids": list(dict.fromkeys([words.eos_id, *([template.end] if template is not None else [])])),
        "palette": sets[0].palette,
        "bos_id": words.bos_id,
        "pad_id": words.pad_id,
    }


def stream_sentence(parts: list[list[Source]]) -> str:
    """Return what is to be said of a stream."""
    count, size = sum(map(len, parts)), sum(s.bytes for source in parts for s in source)
    fixed = sorted({f.name for source in parts for s in source for f in s.files if not entered_in_the_middle(f)})
    more = f"; {fixed[0]} cannot be entered in the middle and is one part" if fixed else ""
    return (
        f"streamed: {show_bytes(size)} in {count} parts; each is checked and tokenised when it is due, so a bad row is "
        f"found then; the figures are of the first part of each source{more}"
    )


def _template_of(data: DataSection, words: Tokenizer, folder: Path) -> Template:
    """Return the template of the chats, which is saved with the tokenizer: whoever serves the model renders alike."""
    name, source = source_of(data.template, folder)
    made = Template(name, source, words, data.train_on or "assistant")
    if find_template(folder) != source:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return made


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
    mixing: Mixing,
    seed: int,
    decides: str,
    files: dict[str, list[dict[str, Any]]],
) -> Prepared:
    palette = manifest["palette"]

    def rows(name: str) -> Rows:
        return Rows(folder, name, manifest["sequence_tokens"], manifest["dtype"], palette and tuple(palette))

    sources = tuple(rows(n) for n in manifest["train"])
    report = manifest["report"]
    mix = mixing.mix(sources, seed)
    if mix.weights and (empty := [n for n, s in zip(report["sources"], sources, strict=True) if not len(s)]):
        raise InputError(f"data.train: {empty[0]['path']} has a share, but no row of it is left to train on")
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
        stop_ids=tuple(manifest["stop_ids"]),
        pad_id=manifest["pad_id"],
        sequence_tokens=manifest["sequence_tokens"],
        decides=decides,
        files=files,
    )
