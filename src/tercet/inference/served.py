"""A model ready to answer: weights, tokenizer, template, ends of text; from a run, a folder or a .gguf file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tercet.data.spans import Template
from tercet.data.template import Messages, find_template, render, special_tokens
from tercet.data.tokenizer import FILES, Tokenizer, load
from tercet.errors import InputError
from tercet.inference.device import choose_device, on_device
from tercet.inference.quantize import quantize
from tercet.model.decoder import Decoder
from tercet.spec.families import read_config, read_json_object
from tercet.spec.run_folder import RunFolder
from tercet.weights.adapters import base_of, is_adapter
from tercet.weights.reading import load_model, model_place


@dataclass
class Served:
    """`suggested`: the sampling settings that came with the model (generation_config.json)."""

    name: str
    place: Path
    model: Any  # a Decoder, or transformers' module with the same `spec`
    tokenizer: Tokenizer
    template: str | None
    stop: tuple[int, ...]
    suggested: dict[str, Any] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        return min(self.tokenizer.size, self.model.spec.vocabulary)

    @property
    def context_tokens(self) -> int:
        return self.model.spec.context_tokens

    def prompt_ids(self, text: str) -> list[int]:
        """Return a prompt's ids as a document begins: bos (where the model has one), then the text as text."""
        return self.tokenizer.prompt(_utf8(text))

    def chat_ids(
        self, messages: Messages, tools: Sequence[Any] | None = None, more: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a chat up to where the answer begins; control tokens in the template are control tokens.

        Raises InputError when the model has no template. A template that writes bos itself gets no second one.
        """
        if self.template is None:
            raise InputError(
                f"{self.name} has no chat template: it was trained to continue text, not to chat",
                "Continue a text: tercet generate, or /v1/completions.",
            )
        if self._as_trained is not None:
            messages = [self._as_trained.as_it_takes(dict(message)) for message in messages]
        text = render(self.template, messages, special_tokens(self.tokenizer), tools, more=more)
        ids = self._chat_backend.encode(_utf8(text), add_special_tokens=False).ids
        before = self.tokenizer.before.tolist()
        return ids if ids[: len(before)] == before else [*before, *ids]

    @cached_property
    def _as_trained(self) -> Template | None:
        """The template as training reads it; None for one that nothing could be trained under."""
        try:
            return Template("the model's own", self.template or "", self.tokenizer)
        except InputError:
            return None

    @cached_property
    def _chat_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with control tokens read as such: its own, for the server's threads share the other one."""
        made = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        made.encode_special_tokens = False
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without control tokens."""
        return self.tokenizer.backend.decode(list(ids), skip_special_tokens=True)


def _utf8(text: str) -> str:
    """Return the text. Raises InputError for one that arrived in bytes that are no UTF-8 (Python holds them as half
    surrogate pairs)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = f"{text[max(0, error.start - 20) : error.start]!r} and then byte {ord(text[error.start]) & 0xFF:#04x}"
        raise InputError(
            f"the text is not UTF-8: {seen}", "Give it as UTF-8 (locale: C.UTF-8 or en_US.UTF-8)."
        ) from None
    return text


def require_finished(path: Path) -> None:
    """Raise InputError for a run folder that holds no trained model yet."""
    if (path / "recipe.yaml").is_file() and not any((path / name).is_dir() for name in ("model", "adapter")):
        raise InputError(f"{path} has no trained model yet", f"Finish it with: {RunFolder(path).resume}")


def own_tokenizer(place: Path) -> Tokenizer:
    """Return the tokenizer of a model. Raises InputError that speaks of the model: no recipe with data.tokenizer is at work."""
    try:
        return load(place)
    except InputError as error:
        raise of_model(error) from None


def of_model(error: InputError) -> InputError:
    """Return the error of reading a model's own tokenizer without the recipe's key in front."""
    return InputError(error.message.removeprefix("data.tokenizer: "), error.hint)


def tokenizer_place(place: Path) -> Path:
    """Return where a model's tokenizer lies: with it, or where an adapter brings none with its base."""
    return place if not is_adapter(place) or any((place / name).is_file() for name in FILES) else base_of(place)


def open_served(
    name: str | Path,
    dtype: str | None = None,
    device: str = "auto",
    quantized: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Served:
    """Load what `name` means onto a device (auto: a card where there is one), its matrices as int8 or int4 if asked.

    Raises InputError when it holds no model or no tokenizer, or the device has no room for it.
    """
    choose_device(device)
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise InputError(
            f"{path} is a recipe, not a trained model", f"Train it: tercet train {path}; then give the run folder."
        )
    require_finished(path)
    place = model_place(name)
    words = tokenizer_place(place)
    tokenizer = own_tokenizer(words)
    suggested, stop = generation_settings(base_of(place), tokenizer.eos_id)
    model = load_model(place, dtype or ("bf16" if quantized else None))
    if quantized:  # before it moves: a card need not hold it whole
        say(str(quantize(model, quantized, min(tokenizer.size, model.spec.vocabulary))))
    model = on_device(model, device)
    if isinstance(model, Decoder):
        model.join()
    return Served(
        path.resolve().name if path.exists() else str(name),
        place,
        model,
        tokenizer,
        find_template(words),
        stop,
        suggested,
    )


def generation_settings(place: Path, eos_id: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return (what came with the model in generation_config.json, the ids that end a text)."""
    file = place / "generation_config.json"
    suggested = read_json_object(file) if file.is_file() else {}
    stop = [eos_id]
    for source in (read_config(place), suggested):
        ends = source.get("eos_token_id")
        stop += ends if isinstance(ends, list) else [] if ends is None else [ends]
    return suggested, tuple(dict.fromkeys(stop))
