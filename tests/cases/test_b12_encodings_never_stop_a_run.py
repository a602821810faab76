"""B12: bytes that are not UTF-8 are named with line and offset; printing never fails; files are UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tercet.errors import InputError
from tests.texts import made, sentence

CHINESE = "我在年青时候也曾经做过许多梦"
WRITTEN = {".yaml", ".json", ".jsonl", ".html", ".log"}


def test_a_stray_byte_is_named_by_line_and_offset(tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = b'{"text": "caf\xc0 au lait"}'
    path.write_bytes(b'{"text": "one"}\n' + bad + b"\n" + '{"text": "naïve"}\n'.encode())
    with pytest.raises(InputError, match=r"line 2, column 14: invalid bytes: byte 0xc0 at offset 13 of the line"):
        made(tmp_path, path)
    prepared = made(tmp_path, path, bad_rows="skip")
    assert prepared.report["rows"] == {"read": 3, "train": 2, "validation": 0, "dropped": 1}


def test_a_gbk_file_and_a_utf_16_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"line one\n" + CHINESE.encode("gbk"))
    with pytest.raises(InputError, match=r"a\.txt, line 2, column 1: invalid bytes: byte 0xce at offset 9 of the file"):
        made(tmp_path, path)
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes('{"text": "x"}'.encode("utf-16"))
        with pytest.raises(InputError, match="UTF-16; save it as UTF-8"):
            made(tmp_path, tmp_path / name)


@pytest.mark.slow
def test_a_console_without_letters_prints_all_the_same(tmp_path):
    """The whole command, in a C locale with an ASCII console, on Chinese text with a broken row."""
    rows = [json.dumps({"text": f"{CHINESE} {sentence(n)}"}, ensure_ascii=False).encode() for n in range(20)]
    data = tmp_path / "数据.jsonl"
    data.write_bytes(b"\n".join([*rows, b'{"text": "\xd6\xd0"}']))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {layers: 1, width: 8, heads: 1, ffn: 8, vocabulary: 400}\n"
        f"data: {{train: '{data}', tokenizer: train, sequence_tokens: 64, long_rows: split,"
        f" cache: '{tmp_path}/c'}}\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}

    def run(*arguments, command="prepare"):
        words = [sys.executable, "-m", "tercet", command, str(recipe), *arguments]
        return subprocess.run(words, env=environment, capture_output=True, timeout=120, cwd=tmp_path)

    stopped = run()
    assert stopped.returncode == 2, stopped.stderr
    assert b"line 21, column 11: invalid bytes: byte 0xd6 at offset 10 " in stopped.stderr
    assert b"Traceback" not in stopped.stderr
    done = run("data.bad_rows=skip", "--show", "2")
    assert done.returncode == 0, done.stderr
    assert b"20 to train" in done.stdout and b"== document 1" in done.stdout
    found = json.loads(run("data.bad_rows=skip", "--show", "1", "--json").stdout)
    assert found["hit"] is True and CHINESE[:4] in json.dumps(found["samples"][0], ensure_ascii=False)
    manifest = next((tmp_path / "c").glob("*/manifest.json"))
    assert "数据.jsonl" in manifest.read_text(encoding="utf-8")
    # A training run: its samples and data's names are Chinese, and all that it leaves behind is UTF-8.
    folder = tmp_path / "运行"
    keys = ("data.bad_rows=skip", "train.steps=2", "train.batch_sequences=2", "data.validation=none", "--ranks", "1")
    trained = run(*keys, f"train.sample_prompts=[{CHINESE[:6]}]", "--output", str(folder), command="train")
    assert trained.returncode == 0, trained.stderr
    assert b"Traceback" not in trained.stdout + trained.stderr
    texts = {p.suffix: p.read_bytes().decode("utf-8") for p in folder.rglob("*") if p.suffix in WRITTEN}
    assert texts.keys() == WRITTEN
    assert CHINESE[:6] in texts[".jsonl"] and "数据.jsonl" in texts[".html"] and "数据.jsonl" in texts[".yaml"]


def test_a_file_name_that_is_no_text(tmp_path):
    path = os.fsencode(tmp_path / "rows-") + b"\xff.jsonl"
    with open(path, "wb") as file:
        file.write(f'{{"text": "{sentence(1)}"}}\n{{"text": 1}}'.encode())
    prepared = made(tmp_path, tmp_path, bad_rows="skip")
    assert json.dumps(prepared.report).count("rows-\\ufffd.jsonl, line 2") == 1
