"""G56: UTF-16 without a byte order mark, which is valid UTF-8 full of NULs, is named and never trained."""

from __future__ import annotations

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
