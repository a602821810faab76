"""A tiny model folder that can be talked to: byte-level tokenizer, ChatML template, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tercet.data.tokenizer import train
from tercet.weights.writing import save_folder
from tests.tiny import tiny_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_served(folder: Path, template: str | None = CHATML, seed: int = 3, **sizes: Any) -> Path:
    """Write the folder. Its weights are large enough that greedy text varies with the prompt."""
    made = train(iter(["the for statement is used to iterate over a sequence 模型🙂 "] * 9), 320)
    made.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    spec = tiny_model(**{"vocabulary": 352, "context_tokens": 256, **sizes})
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: torch.randn(t.shape, generator=generator) * (1.0 if "embed" in t.name else 0.6 * t.shape[-1] ** -0.5)
        if len(t.shape) > 1
        else torch.ones(t.shape)
        for t in (*spec.tensors(), *spec.buffers())
    }
    ids = {"bos": made.bos_id, "eos": made.eos_id, "pad": made.pad_id}
    save_folder(folder, spec, tensors.items(), torch.float32, token_ids=ids)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.0}))
    return folder
