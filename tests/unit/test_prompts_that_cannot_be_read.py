"""tercet generate: what is wrong with a prompt or a model's folder is said as it is."""

from __future__ import annotations

import pytest
from tests.served_tiny import save_served

from tercet.cli.generate import read_prompts
from tercet.errors import InputError
from tercet.inference.generate import answers
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served


def test_a_prompt_and_a_file_are_one_too_many():
    with pytest.raises(InputError, match="not both"):
        read_prompts("x", "nothere.txt")
    with pytest.raises(InputError, match="give a PROMPT, or --file"):
        read_prompts(None, None)


def test_a_prompt_too_long_is_called_so_before_anything_is_computed(tmp_path, monkeypatch):
    served = open_served(save_served(tmp_path / "m", context_tokens=16))
    monkeypatch.setattr("tercet.inference.batch.Batch.step", lambda batch: pytest.fail("something was computed"))
    long = "x y " * 40
    count = len(served.prompt_ids(long))
    with pytest.raises(
        InputError, match=rf"prompt 2 is too long: it has {count} tokens, and the model reads 16"
    ) as told:
        answers(served, ["ok", long], 2, Sampling())
    assert "15 tokens at most" in str(told.value) and "Give at least one character" not in str(told.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_broken_file_of_a_model_is_named_without_a_key_that_nobody_set(file, tmp_path):
    folder = save_served(tmp_path / "m")
    (folder / file).write_text("{")
    with pytest.raises(InputError) as told:
        open_served(folder)
    assert "data.tokenizer" not in str(told.value) and str(folder) in str(told.value)
    if file != "tokenizer.json":
        assert f"{folder / file}, line 1: not valid JSON" in str(told.value)
