"""tercet generate: continue a prompt with a trained model."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def generate(
        folder: Annotated[
            str, typer.Argument(metavar="RUN|FOLDER", help="A run folder or a Hugging Face model folder.")
        ],
        prompt: Annotated[str, typer.Argument(help="The text to continue.")],
        tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 64,
        temperature: Annotated[float, typer.Option(help="0 takes the most probable token.", min=0.0)] = 0.0,
        top_p: Annotated[
            float, typer.Option(help="Choose among the most probable tokens that reach this sum.", min=0.0, max=1.0)
        ] = 1.0,
        seed: Annotated[int, typer.Option(help="Of the choice at temperature above 0.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    ) -> None:
        """Continue PROMPT with a trained model."""
        from tercet.inference.generate import generate_text

        text, ids = generate_text(folder, prompt, tokens, temperature=temperature, top_p=top_p, seed=seed)
        if as_json:
            import orjson

            typer.echo(orjson.dumps({"prompt": prompt, "text": text, "tokens": ids}).decode())
        else:
            typer.echo(prompt + text)
