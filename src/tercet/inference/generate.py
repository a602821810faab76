"""Text from a model and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tercet.errors import InputError
from tercet.inference.batch import Batch, Running
from tercet.inference.sampling import Sampling
from tercet.inference.served import Served, open_served
from tercet.inference.text import TextStream


@dataclass(frozen=True)
class Answer:
    """finish: "stop" (an end of text or a stop string came) or "length"."""

    prompt: str
    text: str
    tokens: list[int]
    finish: str


def stream(
    served: Served, batch: Batch, ids: Sequence[int], limit: int, sampling: Sampling, stops: Sequence[str]
) -> Iterator[str]:
    """Yield the text of one answer as it comes."""
    require_room(ids, batch.capacity)
    text = batch.add(ids, limit, sampling, served.stop)
    shown = TextStream(served.decode, ids, stops)
    try:
        seen = 0
        while not text.done and not shown.stopped:
            batch.step()
            for token in text.new[seen:]:
                if piece := shown.push(token):
                    yield piece
            seen = len(text.new)
        if rest := shown.finish():
            yield rest
    finally:
        batch.remove(text)


def require_room(ids: Sequence[int], capacity: int, what: str = "the prompt") -> None:
    """Raise InputError for a prompt without tokens, or one that leaves no token of `capacity` to the answer."""
    if not ids:
        raise InputError(f"{what} is empty: it has no tokens", "Give at least one character.")
    if len(ids) >= capacity:
        raise InputError(
            f"{what} is too long: it has {len(ids)} tokens, and the model reads {capacity}, answer included",
            f"Shorten it to {capacity - 1} tokens at most.",
        )


def answers(
    served: Served, prompts: Sequence[str], limit: int, sampling: Sampling, stops: Sequence[str] = (), rows: int = 8
) -> list[Answer]:
    """Return the answer to each prompt, up to `rows` computed side by side.

    Raises InputError for a prompt that is empty or too long, before anything is computed.
    """
    batch = Batch(served.model, min(rows, max(1, len(prompts))), vocabulary=served.vocabulary)
    found: dict[int, Answer] = {}
    going: list[tuple[int, Running, TextStream]] = []
    waiting = list(enumerate(map(served.prompt_ids, prompts)))
    for n, ids in waiting:
        require_room(ids, batch.capacity, "the prompt" if len(prompts) == 1 else f"prompt {n + 1}")
    while waiting or going:
        while waiting and batch.has_room:
            n, ids = waiting.pop(0)
            going.append((n, batch.add(ids, limit, sampling, served.stop), TextStream(served.decode, ids, stops)))
        got = batch.step()
        for entry in list(going):
            n, text, shown = entry
            if text in got and not text.ended:
                shown.push(text.new[-1])
            if text.done or shown.stopped:
                shown.finish()
                finish = "stop" if text.ended or shown.stopped else "length"
                found[n] = Answer(prompts[n], shown.text, text.new, finish)
                batch.remove(text)
                going.remove(entry)
    return [found[n] for n in range(len(prompts))]


def generate_text(
    folder: str | Path, prompt: str, tokens: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> tuple[str, list[int]]:
    """Return (continuation, its ids). `folder` is a run folder, a Hugging Face folder or a .gguf file.

    Raises InputError when the folder has no model or no tokenizer, or the prompt has no token.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    found = answers(open_served(folder), [prompt], tokens, sampling)[0]
    return found.text, found.tokens
