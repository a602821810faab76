"""A hundred model folders, damaged by a seeded hand: each is read, or refused with a sentence that names the file."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from tercet.errors import TercetError
from tercet.inference.generate import answers
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served
from tercet.weights.writing import write_shards
from tests.served_tiny import save_served

JUNK = [
    None,
    "",
    "x",
    "../../etc/passwd",
    -1,
    0,
    1,
    2.5,
    1e308,
    10**12,
    True,
    [],
    [1],
    {},
    {"a": [None]},
    "\x00",
    float("nan"),
]
LIMIT_SECONDS = 60
LATENT = {"kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "value_dim": 12, "kv_heads": None}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12}
KINDS = {
    "llama": {"tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 8, **EXPERTS},
    "deepseek_v3": {"family": "deepseek_v3", **LATENT, **EXPERTS, "dense_layers": 1, "mtp_depth": 1},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> list[Path]:
    from safetensors.torch import load_file

    made = [save_served(tmp_path_factory.mktemp(kind) / "base", **sizes) for kind, sizes in KINDS.items()]
    whole = load_file(made[0] / "model.safetensors")
    (made[0] / "model.safetensors").unlink()
    write_shards(made[0], whole.items(), shard_bytes=20_000)
    return made


def mutate_bytes(file: Path, hand: random.Random) -> None:
    content = bytearray(file.read_bytes())
    kind = hand.randrange(4)
    if kind == 0:
        content = content[: hand.randrange(len(content))]
    elif kind == 1:
        for _ in range(hand.randrange(1, 20)):
            content[hand.randrange(min(len(content), 4000))] = hand.randrange(256)
    elif kind == 2:
        at = hand.randrange(len(content))
        content[at:at] = bytes(hand.randrange(256) for _ in range(hand.randrange(1, 40)))
    else:
        content = bytearray(
            hand.choice([b"", b"[]", b"null", b"[" * 9999, b"\xef\xbb\xbf{}", b"version https://git-lfs"])
        )
    file.write_bytes(content)


def mutate_json(file: Path, hand: random.Random) -> None:
    """Change, drop or add a value at a random place of the tree."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = hand.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and hand.random() < 0.6:
            place = place[key]
            continue
        if hand.random() < 0.25:
            del place[key]
        else:
            place[key] = hand.choice(JUNK)
        break
    file.write_text(json.dumps(tree), encoding="utf-8")


def mutate_files(file: Path, hand: random.Random) -> None:
    """Take a file away, or put a folder, a link to itself, or another file in its place."""
    kind, others = hand.randrange(4), sorted(p for p in file.parent.iterdir() if p.is_file() and p != file)
    content = hand.choice(others).read_bytes()
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(file.name)
    elif kind == 3:
        file.write_bytes(content)


def mutate_header(file: Path, hand: random.Random) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = hand.choice([n for n in header if n != "__metadata__"])
    key = hand.choice(["dtype", "shape", "data_offsets"])
    old = header[name][key]
    new = [hand.choice(["F16", "I64", "BOOL", "F8_E4M3", "F4"]), old[::-1], [2**40, 2**41], *JUNK]
    header[name][key] = hand.choice(new) if key != "dtype" or hand.random() < 0.5 else new[0]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def too_long(*_: object) -> None:
    raise TimeoutError("no end")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_of_them(bases, tmp_path):
    hand = random.Random(20)
    wrong, read, refused = [], 0, 0
    signal.signal(signal.SIGALRM, too_long)
    for n in range(120):
        folder = tmp_path / f"case{n}"
        shutil.copytree(hand.choice(bases), folder)
        files = sorted(p for p in folder.iterdir() if p.name != "README.md")
        file = hand.choice(files)
        ways = [mutate_bytes, mutate_files]
        if file.suffix == ".json":
            ways += [mutate_json] * 4
        if file.suffix == ".safetensors":
            ways += [mutate_header] * 3
        way = hand.choice(ways)
        way(file, hand)
        what = f"case{n}: {way.__name__} of {file.name}"
        signal.alarm(LIMIT_SECONDS)
        try:
            answers(open_served(folder), ["the for"], 2, Sampling())
            read += 1
        except TercetError as error:
            refused += 1
            if str(folder) not in str(error) or len(str(error)) > 3000:
                wrong.append(f"{what}: names no file: {error}")
        except BaseException as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        finally:
            signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
    assert read > 10 and refused > 40
