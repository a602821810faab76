"""CSV with a header: a row is a record, its columns are named by the first line. Lines count from 1."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tercet.data import rows
from tercet.data.compressed import open_bytes
from tercet.data.rows import Fault, Reading, Row, excerpt

SUFFIXES = (".csv", ".tsv")
_LONGEST_FIELD = 1 << 30  # characters; Python's own limit of 131 072 is less than a document
_SURPLUS = "\0surplus"  # where values beyond the header's columns go; no header can hold it


def sniff(path: Path, head: bytes) -> bool:
    return True


def read(path: Path, reading: Reading) -> Iterator[Row | Fault]:
    """Yield every record. Bytes that are not UTF-8 and a quote that never ends are fatal: what follows is lost."""
    tabs = ".tsv" in [s.lower() for s in path.suffixes]
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(_LONGEST_FIELD)
        line = 1
        try:
            header = text.readline()
            dialect = "excel-tab" if tabs else _Semicolons if ";" in header and "," not in header else "excel"
            records = csv.DictReader(_without_nul(chain([header], text)), strict=True, dialect=dialect)
            records.restkey = _SURPLUS
            names = list(records.fieldnames or ())
            if len(set(names)) < len(names):
                twice = next(n for n in names if names.count(n) > 1)
                yield Fault(1, 1, rows.TWICE, rows.twice_detail(twice), excerpt(",".join(names)), fatal=True)
                return
            line = records.line_num + 1
            for record in records:
                yield _judge(record, names, line, reading)
                line = records.line_num + 1
        except UnicodeDecodeError as error:
            marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            detail = rows.not_utf8(error.object, error.start)
            if line == 1 and error.object.startswith(marks):
                detail = rows.UTF_16
            yield Fault(line, 1, rows.BAD_BYTES, detail, fatal=True)
        except (csv.Error, ValueError) as error:
            nul = isinstance(error, _Nul)
            yield Fault(line, 1, rows.BAD_BYTES if nul else "bad CSV", rows.NULS if nul else str(error), fatal=True)


class _Semicolons(csv.excel):
    """As spreadsheets write it where a comma stands in numbers."""

    delimiter = ";"


class _Nul(ValueError):
    pass


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if "\0" in line:
            raise _Nul
        yield line


def _judge(record: dict[str, str | None], names: list[str], line: int, reading: Reading) -> Row | Fault:
    if record.pop(_SURPLUS, None):
        reading.seen["kind: other"] += 1
        return Fault(line, 1, "bad CSV", f"the record has more values than the header's {len(names)} columns")

    def column_of(name: str) -> int:
        return names.index(name) + 1 if name in names else 1

    return rows.judge(record, reading, line, 1, column_of, lambda: excerpt(", ".join(map(str, record.values()))))
