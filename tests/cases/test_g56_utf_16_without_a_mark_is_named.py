"""G56: UTF-16 without a byte order mark, which is valid UTF-8 full of NULs, and older encodings are named, never trained."""

from __future__ import annotations

import subprocess

import pytest

from tercet.errors import InputError
from tests.texts import made, sentence

CONTENTS = {
    "a.txt": sentence(1, 50),
    "a.md": "\n" * 5000 + sentence(1),
    "a.jsonl": f'{{"text": "{sentence(1)}"}}\n',
    "a.json": f'[{{"text": "{sentence(1)}"}}]',
    "a.csv": f"text\n{sentence(1)}\n",
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_it_is_named(tmp_path, name, encoding):
    (tmp_path / name).write_bytes(CONTENTS[name].encode(encoding))
    with pytest.raises(InputError, match=r"NUL characters, as UTF-16 without a byte order mark does"):
        made(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        ("今天的天气很好，我们去公园。\n" * 20, "gb18030", "GB18030 (GBK)"),
        ("Der Bär läuft über die Straße – „schön“\n" * 20, "cp1252", "Windows-1252"),
        ("\x00\x01\x80\x9d\xff", "latin-1", None),
    ],
)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "json"])
def test_an_older_encoding_is_named_with_the_command_that_converts_it(tmp_path, kind, text, encoding, named):
    whole = {"txt": text, "jsonl": f'{{"text": "{text.strip()}"}}'.replace("\n", " "), "csv": f"text\n{text}"}
    path = tmp_path / f"a.{kind}"
    path.write_bytes((whole.get(kind) or f"[{whole['jsonl']}]").encode(encoding))
    with pytest.raises(InputError) as refused:
        made(tmp_path, path)
    if named is None:
        assert "iconv" not in refused.value.message
        return
    assert f"it looks like {named}" in refused.value.message
    code = refused.value.message.partition("iconv -f ")[2].split()[0]
    done = subprocess.run(["iconv", "-f", code, "-t", "UTF-8", str(path)], capture_output=True, check=True)
    assert text.strip().split("\n")[0] in done.stdout.decode()
