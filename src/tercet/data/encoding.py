"""Checked documents into tokens, and tokens into sets: texts as they are, chats through their template and masks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet.data import corpus
from tercet.data.chat_work import ChatJob, Worked, renumbered
from tercet.data.corpus import TRAIN, VALIDATION, Corpus, Findings, Tag
from tercet.data.encoders import Encoders
from tercet.data.long import LongRows
from tercet.data.losses import Losses
from tercet.data.masks import Masked, fit
from tercet.data.shards import Palette, Rows, Writer
from tercet.data.sources import paths_of
from tercet.data.spans import Template
from tercet.data.tokenize import TextPiece, batches, encode_stream
from tercet.data.tokenizer import Tokenizer
from tercet.errors import InputError
from tercet.spec.recipe import DataSection

CHAT_CHARACTERS = 1 << 18  # of a batch of chats
TOO_LONG, NO_TOKENS = "too long", "no tokens"
NOTHING_TRAINED, REFUSED, SPELLED = "nothing to train", "refused by the template", "spells a control token"
_FAULTS = {
    NO_TOKENS: "the tokenizer makes nothing of their text",
    REFUSED: "the chat template refuses them",
    SPELLED: "they spell a control token, which this tokenizer cannot be told to read as text",
}
Progress = Callable[[int, int, str], None]


class Meter:
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


@dataclass(eq=False)
class _ChatRow:
    """A row that is a chat while its documents are encoded."""

    tag: Tag
    kept: int = 0
    long: bool = False
    encoded: list[Masked] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.tag.file.name}, line {self.tag.line}"


class Encoding:
    """Tokenises the checked documents into writers and applies the rule for long ones."""

    def __init__(
        self,
        checked: Corpus,
        words: Tokenizer,
        template: Template | None,
        data: DataSection,
        folder: Path,
        meter: Meter,
    ):
        self.checked, self.words, self.data, self.folder, self.meter = checked, words, data, folder, meter
        self.characters = {TRAIN: 0, VALIDATION: 0}
        self.losses = Losses(words, len(checked.train) + len(checked.validation))
        self.palette = Palette() if template is not None else None
        self.job = template and ChatJob(words, template.name, template.source, template.train_on)
        self.chats: Counter[str] = Counter()
        self.long = LongRows(data.sequence_tokens)  # of what is trained
        self.untrained: str | None = None  # the first row with nothing to train, as it reads

    def _writer(self, name: str) -> Writer:
        return Writer(self.folder, name, self.data.sequence_tokens, self.words.dtype, self.palette)

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
        if self.checked.has_texts:
            self._texts(side, writers, findings)
        if self.job is not None and self.palette is not None:
            self._chats(side, writers, findings, self.job, self.palette)

    def _texts(self, side: int, writers: list[Writer], findings: Findings) -> None:
        start, end = self.words.before, self.words.after
        empty = True
        for piece in encode_stream(self.words, self._watched(side, chats=False), characters=findings.characters):
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
            if side == TRAIN and not tag.stream:
                self.long.text(writer.current)
            done = writer.end("split" if tag.stream else self.data.long_rows)
            if done == "drop":
                self._drop(findings, side, TOO_LONG, tag)
            elif done is not None and not tag.stream:
                findings.seen[f"long rows {done}"] += 1

    def _chats(self, side: int, writers: list[Writer], findings: Findings, job: ChatJob, palette: Palette) -> None:
        """Encode the chats, batch by batch. One row may be several documents; it is dropped when none of them is kept."""
        running: deque[tuple[list[TextPiece], Future[list[Worked]]]] = deque()
        with Encoders(job, findings.characters) as encoders:
            for batch in batches(self._watched(side, chats=True), CHAT_CHARACTERS):
                running.append((batch, encoders.submit([part.text for part in batch])))
                if len(running) > 2 * encoders.count:
                    self._take(side, writers, findings, palette, *running.popleft())
            while running:
                self._take(side, writers, findings, palette, *running.popleft())

    def _take(
        self,
        side: int,
        writers: list[Writer],
        findings: Findings,
        palette: Palette,
        batch: list[TextPiece],
        future: Future[list[Worked]],
    ) -> None:
        for part, worked in zip(batch, future.result(), strict=True):
            tag: Tag = part.tag
            if worked.refused is not None:
                self._drop(findings, side, REFUSED, tag, worked.refused)
                continue
            if worked.spelled:
                self._drop(findings, side, SPELLED, tag)
                continue
            self.chats.update(worked.counts)
            row = _ChatRow(tag)
            for masked in renumbered(worked, palette):
                self.losses.ids(tag.source, masked.ids)
                self._fit(writers[tag.source], masked, row)
            self._close(row, findings, side)

    def _fit(self, writer: Writer, masked: Masked, row: _ChatRow) -> None:
        length = masked.ids.size
        writer.full_lengths.append(length)
        pieces, left = fit(masked, self.data.sequence_tokens, self.data.long_rows)
        row.encoded.append(masked)
        for ids, trained in pieces:
            writer.append(ids, trained)
            writer.close()
        row.long = row.long or length > self.data.sequence_tokens
        row.kept += len(pieces)
        if left:
            self.chats["trained tokens left out with them"] += left
        if not pieces and length <= self.data.sequence_tokens and self.untrained is None:
            self.untrained = f"{row.place}\n{self.words.decode(masked.ids)}"

    def _close(self, row: _ChatRow, findings: Findings, side: int) -> None:
        self.chats["rows"] += 1
        if row.long:
            self.chats["rows longer than a sequence"] += 1
            if side == TRAIN:
                self.long.chat(row.encoded)
        if not row.kept:
            dropped = row.long and self.data.long_rows == "drop"
            self._drop(findings, side, TOO_LONG if dropped else NOTHING_TRAINED, row.tag)
        elif row.long:
            findings.seen[f"long rows {'split' if self.data.long_rows == 'split' else 'cut'}"] += 1

    def chat_figures(self, template: Template) -> dict[str, Any]:
        """Return what the report says of chats."""
        spell = self.words.backend.id_to_token
        return {
            "template": template.name,
            "train_on": template.train_on,
            "answers_end_with": spell(template.end),
            "begins_with": None if self.words.bos_id is None else spell(self.words.bos_id),
            **{name: n for name, n in sorted(self.chats.items()) if n},
        }

    def _watched(self, side: int, chats: bool) -> Iterator[TextPiece]:
        for part in self.checked.documents(side):
            if part.tag.chat != chats:
                continue
            self.characters[side] += len(part.text)
            self.losses.text(part.tag.source, part.text)
            self.meter(len(part.text))
            yield part

    def _drop(self, findings: Findings, side: int, reason: str, tag: Tag, why: str = "") -> None:
        findings.drop(reason, f"{tag.file.name}, line {tag.line}, column 1{why and ': ' + why}")
        findings.kept -= 1
        self.checked.late[side] += 1

    def complain(self, sets: list[Rows], held_out: Rows | None) -> None:
        """Raise InputError when a side came out empty, or rows gave no tokens and bad rows are to stop."""
        dropped = sum((f.dropped for f in self.checked.findings.values()), Counter())
        for reason, words in _FAULTS.items():
            if dropped[reason] and self.data.bad_rows == "stop":
                places = [p for f in self.checked.findings.values() for p in f.places.get(reason, [])]
                raise InputError(
                    f"{dropped[reason]} rows cannot be used: {words}\n" + "\n".join(places),
                    "Set data.bad_rows=skip to leave them out.",
                )
        if self.untrained is not None and 2 * dropped[NOTHING_TRAINED] > self.chats["rows"]:
            raise InputError(
                f"{dropped[NOTHING_TRAINED]} of {self.chats['rows']} chats have nothing to train; the first: {self.untrained}",
                "Look at their weights, at data.train_on and at data.template.",
            )
        length = self.data.sequence_tokens
        hint = f"Rows over data.sequence_tokens ({length}) are dropped unless data.long_rows is cut or split."
        train, validation = self.checked.train, self.checked.validation
        for key, empty, sources in (
            ("train", not any(map(len, sets)), train),
            ("validation", held_out is not None and not len(held_out), validation or train),
        ):
            if empty:
                reasons = corpus.counted(dropped)
                raise corpus.NothingLeft(
                    f"data.{key}: no row is left (dropped: {reasons}): {paths_of(sources)}",
                    hint if dropped[TOO_LONG] else None,
                )
