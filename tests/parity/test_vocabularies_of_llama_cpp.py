"""Qwen2, Llama 3 and DeepSeek LLM: ids of llama.cpp's own test texts, and chats under their templates.

The files are vocabularies without weights, with texts (.inp) and ids (.out), in the source of llama-cpp-python;
`make test-slow` fetches them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tercet.data import tokenizer
from tests.parity.test_chats_of_real_tokenizers import compare

FOLDER = Path(sys.prefix) / "share" / "vocabularies"
# transformers' reader cuts as GPT-2 does in place of this file's own rule: one of its texts is read otherwise.
OTHERWISE = {"deepseek-llm": {"ied 4 ½ months"}}


def place_of(name: str) -> Path:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not here (make test-slow fetches it)")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "deepseek-llm"])
def test_ids_are_llama_cpps(name):
    path = place_of(name)
    expected = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[: len(expected)]
    assert len(expected) > 40
    found = [ids.tolist() for ids in tokenizer.load(path).encode(texts)]
    other = {t for t, ours, theirs in zip(texts, found, expected, strict=True) if ours != theirs}
    assert other == OTHERWISE.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "template", "end", "bos"),
    [("qwen2", "qwen3", "<|im_end|>", None), ("llama-bpe", "llama-3", "<|eot_id|>", 128000)],
)
def test_chats_under_their_templates(name, template, end, bos):
    from transformers import AutoTokenizer

    path = place_of(name)
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    compare(path, template, reference, end, bos)
