"""tercet generate: continue prompts with a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tercet.errors import InputError

if TYPE_CHECKING:
    from tercet.inference.sampling import Sampling
    from tercet.inference.served import Served


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: tercet generate runs/first-light-1 'The for statement' --temperature 0.8")
    def generate(
        folder: Annotated[
            str, typer.Argument(metavar="RUN|FOLDER", help="A run folder, a Hugging Face model folder or a .gguf file.")
        ],
        prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
        file: Annotated[
            str | None, typer.Option(help="Prompts: one a line, or .jsonl with a `prompt` in each row; - is stdin.")
        ] = None,
        batch: Annotated[int, typer.Option(help="Prompts computed side by side.", min=1, max=256)] = 8,
        tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 64,
        temperature: Annotated[float, typer.Option(help="0 takes the most probable token.", min=0.0)] = 0.0,
        top_k: Annotated[int, typer.Option(help="Choose among so many most probable tokens; 0: all.", min=0)] = 0,
        top_p: Annotated[
            float, typer.Option(help="Choose among the most probable tokens that reach this sum.", min=0.0, max=1.0)
        ] = 1.0,
        min_p: Annotated[
            float, typer.Option(help="Leave out tokens below this share of the most probable one.", min=0.0, max=1.0)
        ] = 0.0,
        repetition_penalty: Annotated[
            float, typer.Option(help="Above 1 makes tokens of the text so far less likely.", min=0.01)
        ] = 1.0,
        stop: Annotated[list[str] | None, typer.Option(help="End in front of this text; may be repeated.")] = None,
        seed: Annotated[int, typer.Option(help="Of the choice at temperature above 0.")] = 0,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
        quantize: Annotated[
            Literal["int8", "int4"] | None, typer.Option(help="Hold the weights in fewer bits; says what that changes.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, one object a prompt.")] = False,
    ) -> None:
        """Continue PROMPT, or every prompt of a file, with a trained model."""
        from tercet.cli import require_models, say_aside

        prompts = read_prompts(prompt, file)
        require_models(folder)
        from tercet.inference.sampling import Sampling
        from tercet.inference.served import open_served

        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        served = open_served(folder, None, device, quantize, say_aside)
        if len(prompts) == 1 and not as_json:
            _show(served, prompts[0], tokens, sampling, stop or [])
            return
        from tercet.inference.generate import answers

        for answer in answers(served, prompts, tokens, sampling, stop or [], batch):
            if as_json:
                import orjson

                typer.echo(orjson.dumps(vars(answer)).decode())
            else:
                typer.echo(answer.prompt + answer.text)


def _show(served: Served, prompt: str, tokens: int, sampling: Sampling, stops: list[str]) -> None:
    """Print the prompt and its continuation as it comes."""
    from tercet.inference.batch import Batch
    from tercet.inference.generate import stream

    batch = Batch(served.model, 1, vocabulary=served.vocabulary)
    pieces = stream(served, batch, served.prompt_ids(prompt), tokens, sampling, stops)
    first = next(pieces, "")  # an error comes before anything is printed
    typer.echo(prompt + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def read_prompts(prompt: str | None, file: str | None) -> list[str]:
    """Return the prompts of an argument or of a file. Raises InputError for neither, both, or a row without one."""
    import sys
    from pathlib import Path

    if prompt is not None and file is not None:
        raise InputError(
            "give a PROMPT or --file with prompts, not both", f"The prompt is {prompt[:80]!r}, the file {file}."
        )
    if prompt is None and file is None:
        raise InputError("give a PROMPT, or --file with prompts", 'For example: tercet generate RUN "Once upon a time"')
    if prompt is not None:
        return [prompt]
    assert file is not None
    try:
        text = sys.stdin.read() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} cannot be read: {why}") from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"{file} holds no prompt")
    if not file.endswith(".jsonl"):
        return [line for _, line in lines]
    import orjson

    found = []
    for n, line in lines:
        try:
            found.append(orjson.loads(line)["prompt"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise InputError(f'{file}, line {n}: a row is {{"prompt": "…"}}') from None
        if not isinstance(found[-1], str):
            raise InputError(f"{file}, line {n}: prompt is no text")
    return found
