"""G19: a Git LFS pointer or a web page in place of a file is named as what it is, whatever its ending."""

from __future__ import annotations

import gzip

import pytest

from tercet.errors import InputError
from tests.texts import made, sentence

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"  \n<!DOCTYPE HTML>\n<html><head><title>Not found</title></head></html>"


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.jsonl", "a.json", "a.csv", "a.arrow", "a.md"])
@pytest.mark.parametrize(("content", "what"), [(POINTER, "Git LFS pointer"), (PAGE, "web page")])
def test_it_is_named(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} is a {what}"):
        made(tmp_path, path)
    with pytest.raises(InputError, match=rf"{name} is a {what}"):
        made(tmp_path, tmp_path)


def test_a_page_can_be_trained_on_by_name_and_a_pointer_cannot(tmp_path):
    (tmp_path / "page.txt").write_bytes(PAGE + sentence(1, 40).encode())
    assert made(tmp_path, [{"path": str(tmp_path / "page.txt"), "format": "text"}]).report["rows"]["train"] == 1
    (tmp_path / "page.txt").write_bytes(POINTER)
    with pytest.raises(InputError, match="Git LFS pointer"):
        made(tmp_path, [{"path": str(tmp_path / "page.txt"), "format": "text"}])


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:40] + b"xxxxxxxx" + b[48:], lambda b: b"no gzip at all"]
)
def test_a_damaged_archive_is_named(tmp_path, damage):
    rows = "".join(f'{{"text": "{sentence(n)}"}}\n' for n in range(50)).encode()
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(rows)))
    with pytest.raises(InputError, match=r"a\.jsonl\.gz cannot be read"):
        made(tmp_path, path)
