"""Every format yields the same rows, with the place at which each stands."""

from __future__ import annotations

import json

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tercet.data import chat, formats, rows
from tercet.data.formats.json import _BLOCK
from tercet.data.rows import Fault, Reading, Row
from tercet.data.sources import find
from tercet.errors import InputError
from tercet.spec.recipe import SourceSection

TEXTS = ["plain", "two\nlines\n", "tab\tand 'quotes' \"double\"", "中文 and 🙂", "  outer spaces  "]


def read(path, kind=None, **reading):
    return list(formats.formats()[kind or formats.detect(path)].read(path, Reading(**reading)))


def write(folder, kind, texts):
    """Write `texts` in a format; returns the file."""
    path = folder / {"jsonl": "f.jsonl", "json": "f.json", "parquet": "f.parquet", "python": "f.py"}[kind]
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps([{"text": t} for t in texts], indent=1, ensure_ascii=False), encoding="utf-8")
    elif kind == "parquet":
        parquet.write_table(arrow.table({"other": list(range(len(texts))), "text": texts}), path)
    else:
        path.write_text(f"# a comment\nTOPICS = {{i: t for i in ()}}\nROWS = {texts!r}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "python"])
def test_rows_come_back_exactly(tmp_path, kind):
    path = write(tmp_path, kind, TEXTS)
    assert formats.detect(path) == kind
    assert [r.text for r in read(path)] == TEXTS


def test_every_module_is_a_format():
    assert set(formats.formats()) == {"jsonl", "json", "csv", "text", "parquet", "arrow", "python"}


@pytest.mark.parametrize(
    ("line", "reason", "column"),
    [
        ('{"text": "a" 1', rows.BAD_JSON, 14),
        ('{"text" "a"}', rows.BAD_JSON, 9),
        ('{"text": NaN}', rows.BAD_JSON, 1),
        ('["a"]', rows.NOT_OBJECT, 1),
        ('"a"', rows.NOT_OBJECT, 1),
        ('{"txt": "a"}', rows.MISSING, 1),
        ('{"id": 1, "text": null}', rows.NULL, 19),
        ('{"id": {"text": "x"}, "text": 5}', rows.WRONG_TYPE, 31),
        ('{"text": ["a"]}', rows.WRONG_TYPE, 10),
        ('{"text": ""}', rows.EMPTY, 10),
        ('{"text": " \\n\\u3000"}', rows.EMPTY, 10),
        ('{"text": "a \\ud83d b"}', rows.SURROGATE, 10),
        ('{"id": 3, "messages": []}', rows.WRONG_TYPE, 23),
        ('{"instruction": "do", "output": " "}', rows.EMPTY, 33),
        ('{"prompt": "a", "completion": 5}', rows.WRONG_TYPE, 31),
        ('{"messages": [{"role": "user", "content": "a"}]}', chat.NO_ANSWER, 14),
        ('{"messages": [{"role": "queen", "content": "a"}]}', chat.ROLE, 14),
        ('{"prompt": "a", "completion": "\\udc00"}', rows.SURROGATE, 1),
        ('{"chosen": "a", "rejected": "a"}', "bad preference pair", 29),
        ('{"chosen": "a", "rejected": "b"}', chat.PREFERENCE, 12),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_faults_name_line_column_and_reason(tmp_path, kind, line, reason, column):
    path = tmp_path / f"f.{kind}"
    before, after = '{"text": "fine"}', '{"text": "fine too"}'
    comma = "," if kind == "json" else ""
    body = f"{before}{comma}\n{line}{comma}\n{after}\n"
    path.write_text(f"[{body}]" if kind == "json" else body, encoding="utf-8")
    found = read(path, kind)
    fault = found[1]
    assert isinstance(fault, Fault)
    assert (fault.line, fault.reason) == (2, reason)
    if reason != rows.BAD_JSON or kind == "jsonl":
        assert fault.column == column
    if kind == "jsonl" or reason != rows.BAD_JSON:
        assert [type(f) for f in found] == [Row, Fault, Row]
    else:
        # The rest of an array cannot be found, but behind NaN, which can be read.
        assert fault.fatal or "NaN" in fault.detail


def test_json_arrays_are_read_in_pieces(tmp_path):
    """Rows that lie across the borders of what is read at once, and the lines they stand on."""
    path = tmp_path / "f.json"
    texts = [("é🙂" * (n % 700)) + f"\n{n}" for n in range(3000)]
    with path.open("w", encoding="utf-8") as file:
        json.dump([{"n": n, "text": t} for n, t in enumerate(texts)], file, ensure_ascii=False, indent=0)
    assert path.stat().st_size > 3 * _BLOCK
    found = read(path)
    assert [r.text for r in found] == texts
    lines = path.read_text(encoding="utf-8").split("\n")
    assert all(lines[r.line - 1][r.column - 1] == "{" for r in found)


def test_bad_bytes_in_a_json_array_are_placed(tmp_path):
    path = tmp_path / "f.json"
    content = b'[{"text": "one"},\n {"text": "tw\xc0o"}]'
    path.write_bytes(content)
    fault = read(path)[-1]
    assert (fault.reason, fault.line, fault.fatal) == (rows.BAD_BYTES, 2, True)
    assert f"offset {content.index(0xC0)} " in fault.detail


def test_a_json_file_that_is_json_lines(tmp_path):
    path = tmp_path / "f.json"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert formats.detect(path) == "jsonl"
    path.write_text('{\n"data": []}\n')
    assert formats.detect(path) == "json"
    assert "an object" in read(path)[0].detail


def test_map_renames_columns(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"content": "one", "text": 5}\n')
    reading = Reading(columns={"text": "content"})
    assert [r.text for r in formats.formats()["jsonl"].read(path, reading)] == ["one"]
    assert reading.seen["column: text"] == 1


def test_parquet_without_the_column_and_with_nulls(tmp_path):
    path = tmp_path / "f.parquet"
    parquet.write_table(arrow.table({"messages": [[1], [2]]}), path)
    assert [f.reason for f in read(path)] == [rows.WRONG_TYPE] * 2
    parquet.write_table(arrow.table({"text": ["a", None, ""]}), path)
    assert [getattr(f, "reason", "row") for f in read(path)] == ["row", rows.NULL, rows.EMPTY]
    assert [f.line for f in read(path)] == [1, 2, 3]
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="is not a Parquet file"):
        read(path, "parquet")


def test_python_is_parsed_and_never_run(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(
        "import nowhere_at_all\nraise SystemExit\nA = {'k': 'one' ' joined', 'n': 3}\n"
        "B: list = ['two',\n  ' ']\nC = {'f': f'{A}'}\nD = 'not in a dict'\n"
    )
    found = read(path)
    assert [r.text for r in found if isinstance(r, Row)] == ["one joined", "two"]
    assert [(f.reason, f.line, f.column) for f in found if isinstance(f, Fault)] == [(rows.EMPTY, 5, 3)]


def test_plain_text_parts_join_to_the_file(tmp_path):
    path = tmp_path / "f.txt"
    text = "".join(f"Line {n} é\n" + ("\n" if n % 5 == 0 else "") for n in range(2000))
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    parts = read(path, part_characters=500)
    assert "".join(p.text for p in parts) == text
    assert [p.starts for p in parts] == [True] + [False] * (len(parts) - 1)
    assert [p.ends for p in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 20
    assert all(p.line == text.count("\n", 0, text.index(p.text)) + 1 for p in parts)


def test_folders_globs_and_packages(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("x")
    (tmp_path / "a" / "y.jsonl").write_text('{"text": "y"}')
    (tmp_path / "a" / "z.bin").write_text("z")
    (tmp_path / "a" / ".hidden.txt").write_text("h")

    def names(path, **keys):
        return [(f.path.name, f.format) for f in find(SourceSection(path=str(path), **keys), "data.train.0").files]

    assert names(tmp_path / "a") == [("y.jsonl", "jsonl")]  # a text beside tables is passed over
    assert names(tmp_path / "a" / "b") == [("x.txt", "text")]
    assert names(tmp_path / "a" / "**" / "*.txt") == [("x.txt", "text")]
    assert names(tmp_path / "a" / "z.bin", format="text") == [("z.bin", "text")]
    assert names("package:pydoc_data/topics.py") == [("topics.py", "python")]
    for path, said in (
        (tmp_path / "a" / "z.bin", "no format is known"),
        (tmp_path / "a" / "b" / "X.txt", "did you mean x.txt"),
        (tmp_path / "none" / "*.txt", "nothing matches"),
        ("package:pydoc_data/nothing.py", "has no file"),
        ("package:no_such_package_here/a.py", "no package"),
    ):
        with pytest.raises(InputError, match=said):
            names(path)
