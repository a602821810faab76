"""tercet export: a trained model for other programs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tercet.units import parse_bytes


def register(app: typer.Typer) -> None:
    @app.command()
    def export(
        folder: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run folder or a model folder.")],
        output: Annotated[
            str | None,
            typer.Option(help="What to write: a folder, or for gguf a file. Default of --merge: the run's model/."),
        ] = None,
        format: Annotated[
            Literal["hf", "gguf", "ollama"],
            typer.Option(
                help="hf: safetensors for transformers, vLLM; gguf: llama.cpp; ollama: a folder for ollama create."
            ),
        ] = "hf",
        dtype: Annotated[
            Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Default: hf as trained, gguf fp16.")
        ] = None,
        merge: Annotated[
            bool, typer.Option("--merge", help="Of a run with an adapter, or an adapter's folder: base and adapter.")
        ] = False,
        shard: Annotated[str, typer.Option(help="hf: size of a file at most.")] = "4GB",
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    ) -> None:
        """Write a trained model for other programs; it is read back and compared, or not kept.

        Example: tercet export runs/first-light-1 --format gguf --output first-light.gguf
        """
        import sys
        from pathlib import Path

        from tercet.cli import require_models
        from tercet.errors import InputError

        require_models(folder)
        from tercet.inference.export import export_gguf, export_hf, export_ollama

        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            print(text, file=sys.stderr, flush=True)

        if output is None and not (merge and format == "hf" and (Path(folder) / "recipe.yaml").is_file()):
            raise InputError("export needs to know what to write", "Give --output FOLDER, or for gguf --output FILE.")
        target = Path(folder) / "model" if output is None else Path(output).expanduser()
        if format == "hf":
            written = export_hf(folder, target, dtype, parse_bytes(shard), say, merge)
        elif format == "ollama":
            written = export_ollama(folder, target, dtype, say, merge)
        else:
            written = export_gguf(folder, target, dtype, say, merge)
        if as_json:
            import orjson

            typer.echo(orjson.dumps({"output": str(written), "format": format, "checks": said}).decode())
        else:
            typer.echo(str(written))
