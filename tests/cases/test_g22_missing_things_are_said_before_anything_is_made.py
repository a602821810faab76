"""G22: paths, tokenizer, output and format are looked at before a folder is made, a rank is started or torch loads."""

from __future__ import annotations

import pytest

from tercet.data.sources import find_all
from tercet.errors import InputError
from tercet.spec.recipe import build_recipe

HOOK = """
import sys
if sys.orig_argv[1:3] == ['-m', 'tercet']:
    import atexit, pathlib
    atexit.register(lambda: pathlib.Path('modules').write_text('\\n'.join(sys.modules)))
if 'tercet.training.rank' in sys.orig_argv:
    import pathlib
    pathlib.Path('a-rank-was-started').touch()
"""


@pytest.fixture
def watched(cli):
    place = cli.folder / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_text(HOOK)
    cli.environment["PYTHONPATH"] = str(place)
    (cli.folder / "table.xyz").write_bytes(b"\x00\x01\x02")
    (cli.folder / "broken.json").write_text('{"not": "a tokenizer"}')
    (cli.folder / "empty").mkdir()
    (cli.folder / "afile").write_text("x")
    return cli


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("data.train=nowhere.jsonl",), "no file or folder 'nowhere.jsonl'"),
        (("data.train=table.xyz",), "no format is known"),
        (("data.validation=nowhere/*.txt",), "data.validation: nothing matches"),
        (("data.tokenizer=./nowhere",), "no file or folder './nowhere'"),
        (("data.tokenizer=broken.json",), "is not a tokenizer.json"),
        (("data.tokenizer=empty",), "holds no tokenizer"),
        (("data.tokenizer=model",), "brings no tokenizer"),
        (("model.path=./nowhere",), "./nowhere"),
        (("output.folder=afile/run",), "afile is a file"),
    ],
)
def test_said_before_anything_is_made(watched, keys, words):
    before = {p.name for p in watched.folder.iterdir()}
    done = watched.run("train", "small.yaml", *keys, code=2)
    assert words in done.stderr
    assert {p.name for p in watched.folder.iterdir()} - before == {"modules"}
    assert "torch" not in (watched.folder / "modules").read_text().splitlines()


@pytest.mark.slow
def test_what_only_the_ranks_find_leaves_no_run_folder_either(watched):
    (watched.folder / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    done = watched.run("train", "small.yaml", "data.train=bad.jsonl", "data.validation=none", "--ranks", "2", code=2)
    assert "bad.jsonl, line 2" in done.stderr
    assert (watched.folder / "a-rank-was-started").exists()
    assert not list((watched.folder / "runs").iterdir())


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ("a.txt b.txt", "data.train=[a.txt, b.txt]"),
        ("a.txt,b.txt", "data.train=[a.txt, b.txt]"),
        ("https://example.org/a.txt", "download it"),
        ("hub:nobody", "hub:OWNER/NAME"),
    ],
)
def test_data_that_is_written_in_another_way_comes_with_the_right_one(tmp_path, monkeypatch, given, way):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text")
    with pytest.raises(InputError, match="there is no file or folder") as refused:
        find_all(build_recipe({}, [f"data.train={given}"]).data)
    assert way in str(refused.value.hint)
