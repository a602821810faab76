"""Text from a model folder and a prompt."""

from __future__ import annotations

from pathlib import Path

from tercet.data.tokenizer import load
from tercet.errors import InputError
from tercet.model.decode import generate
from tercet.spec.families import read_config
from tercet.weights.reading import load_model, model_place


def generate_text(
    folder: str | Path, prompt: str, tokens: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> tuple[str, list[int]]:
    """Return (continuation, its ids). `folder` is a run folder or a Hugging Face folder with a tokenizer.

    Raises InputError when the folder has no model or no tokenizer, or the prompt has no token.
    """
    path = Path(folder).expanduser()
    if (path / "recipe.yaml").is_file() and not (path / "model").is_dir():
        raise InputError(f"{path} has no trained model yet", f"Finish it with: tercet train --resume {path}")
    path = model_place(folder)
    model = load_model(path)
    tokenizer = load(path)
    ids = [*tokenizer.before.tolist(), *tokenizer.encode([prompt])[0].tolist()]
    if not ids:
        raise InputError("the prompt has no tokens", "Give at least one character.")
    eos = read_config(path).get("eos_token_id", tokenizer.eos_id)
    stop = eos if isinstance(eos, list) else [] if eos is None else [eos]
    new = generate(
        model,
        len(model.spec.layers),
        ids,
        tokens,
        vocabulary=min(tokenizer.size, model.spec.vocabulary),
        stop=stop,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    return tokenizer.decode(new), new
