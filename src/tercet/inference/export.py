"""A trained model as others' programs read it. Every export is read back and compared before it is called done."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from tercet.data.template import Messages, find_template, render, special_tokens
from tercet.data.tokenizer import Tokenizer, load
from tercet.errors import InputError, TercetError
from tercet.inference.ollama import find_wrapping, modelfile
from tercet.inference.served import generation_settings, own_tokenizer, require_finished, tokenizer_place
from tercet.spec.families import describe
from tercet.spec.families.gguf import reader
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection
from tercet.spec.run_folder import RunFolder, read_json
from tercet.units import show_bytes
from tercet.weights.adapters import Merged, base_of, describe_place, is_adapter
from tercet.weights.gguf_writing import CUTS, check_writable, write_gguf
from tercet.weights.reading import DTYPES, load_model, model_place, open_weights, stored_dtype, unmerged
from tercet.weights.stored import Stored
from tercet.weights.writing import save_folder

Say = Callable[[str], None]
TEXTS = (
    "The quick brown fox",
    "  two  spaces\n\nand lines\t",
    "中文分词，标点。",
    "emoji 🙂👍🏽 and ½",
    "12345 67,890.12 3e-4",
    "def f(x):\n    return x",
)
GGUF_NAME = "model.gguf"
TOKENS_COMPARED, COMPARED_PARAMETERS = 32, 500_000_000


def export_hf(source: str, output: Path, dtype: str | None, shard_bytes: int, say: Say, merge: bool = False) -> Path:
    """Write a Hugging Face folder, at most one shard in memory. Raises TercetError when what is read back differs.

    `merge`: of a base and its adapter, in fp32, cast once; the result's logits are compared with theirs.
    """
    unfinished = _Unfinished(output)
    place, spec, stored = _open(source, merge)
    base, words = base_of(place), tokenizer_place(place)
    kind = DTYPES[dtype] if dtype else stored_dtype(place, None)
    with unfinished as folder:
        save_folder(
            folder,
            spec,
            ((t.name, stored.tensor(t.name)) for t in (*spec.tensors(), *spec.buffers())),
            kind,
            words if words.is_dir() else None,
            shard_bytes=shard_bytes,
            source=base,
        )
        if not words.is_dir():
            own_tokenizer(words).save(folder)
        (folder / "README.md").write_text(_card(source, spec, kind), encoding="utf-8")
        again = open_weights(folder, describe(ModelSection(path=str(folder))))
        _compare_tensors(stored, again, kind, say, output)
        _compare_ids(own_tokenizer(words).backend, load(folder).backend)
        if merge and spec.parameters <= COMPARED_PARAMETERS:
            _compare_logits(unmerged(place), load_model(folder, "fp32"), kind, say, str(output))
    return output


def export_gguf(source: str, output: Path, dtype: str | None, say: Say, merge: bool = False) -> Path:
    """Write a GGUF file with tokenizer, template and special ids. Raises InputError for what the format cannot hold."""
    unfinished = _Unfinished(output)
    place, spec, stored = _open(source, merge)
    dtype = dtype or "fp16"
    words = tokenizer_place(place)
    tokenizer = own_tokenizer(words)
    check_writable(spec, tokenizer.backend)
    spec = spec.without_mtp()
    ends = generation_settings(base_of(place), tokenizer.eos_id)[1]
    if len(ends) > 3:
        raise InputError(f"{source} has {len(ends)} ends of text ({ends}); a GGUF file holds three at most")
    ids = {"bos": tokenizer.bos_id, "pad": tokenizer.pad_id, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    name = Path(source).name
    with unfinished as file:
        write_gguf(file, spec, stored, dtype, tokenizer.backend, ids, find_template(words), name)
        again_spec = describe(ModelSection(path=str(file)))
        if again_spec.tensors() != spec.tensors() or again_spec.rope.kind != spec.rope.kind:
            raise TercetError(f"{output}: read back, it describes another model; it was not kept")
        again = open_weights(file, again_spec)
        _compare_tensors(stored, again, DTYPES[dtype], say, output)
        _compare_ids(tokenizer.backend, rebuilt_tokenizer(file))
        if set(generation_settings(file, tokenizer.eos_id)[1]) != set(ends):
            raise TercetError(f"{output}: read back, its answers end elsewhere; it was not kept")
        if find_template(file) != find_template(words):
            raise TercetError(f"{output}: its chat template is another one; it was not kept")
        if spec.parameters <= COMPARED_PARAMETERS:
            _compare_logits(load_model(place, "fp32"), load_model(file, "fp32"), DTYPES[dtype], say, str(file))
    return output


def export_ollama(source: str, output: Path, dtype: str | None, say: Say, merge: bool = False) -> Path:
    """Write a folder for `ollama create`: Modelfile, GGUF file, model card. Raises InputError for a chat template that
    has no equal in a Modelfile."""
    unfinished = _Unfinished(output)
    place, spec, _ = _open(source, merge)
    words = tokenizer_place(place)
    tokenizer, template = own_tokenizer(words), find_template(words)
    wrapping = None if template is None else find_wrapping(_plain(template, tokenizer))
    if wrapping is None:
        say("no chat template: the Modelfile makes a model that continues texts")
    elif template is not None and re.search(r"\btools\b", template):
        say(
            "tools: a Modelfile wraps messages alone, so Ollama refuses requests with tools; serve the GGUF file with llama.cpp"
        )
    spell = tokenizer.backend.id_to_token
    settings, ends = generation_settings(base_of(place), tokenizer.eos_id)
    text = modelfile(wrapping, [stop for i in ends if (stop := spell(i))], settings, spec.context_tokens, GGUF_NAME)
    with unfinished as folder:
        folder.mkdir()
        export_gguf(source, folder / GGUF_NAME, dtype, say, merge)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(_card(source, spec, DTYPES[dtype or "fp16"]), encoding="utf-8")
    return output


def _plain(template: str, tokenizer: Tokenizer) -> Callable[[Messages, bool], str]:
    """Return what renders a template without the begin token: the runtime puts that in front, as the GGUF file says."""
    special = special_tokens(tokenizer)

    def rendered(messages: Messages, answer: bool) -> str:
        text = render(template, messages, special, opening=answer)
        return text if tokenizer.bos_id is None else text.removeprefix(special["bos_token"])

    return rendered


def _open(source: str, merge: bool) -> tuple[Path, Model, Stored | Merged]:
    path = Path(source).expanduser()
    require_finished(path)
    place = path / "adapter" if merge and (path / "adapter").is_dir() else model_place(source)
    if merge and not is_adapter(place):
        raise InputError(f"{place} is a whole model, with nothing to merge", "It is exported as it is without --merge.")
    if not merge and is_adapter(place):
        raise InputError(
            f"{place} is an adapter of {base_of(place)}",
            "--merge writes both as one model; peft and tercet read the adapter as it is.",
        )
    spec = describe_place(place)
    return place, spec, open_weights(place, spec)


class _Unfinished:
    """What is written lies under a temporary name until all is compared; a failure leaves nothing behind."""

    def __init__(self, output: Path):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise InputError(f"{output} exists", "Give another --output, or remove it first.")
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output, self.temporary = output, output.with_name(f".{output.name}.unfinished{output.suffix}")

    def __enter__(self) -> Path:
        self._clear()
        return self.temporary

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self.output.is_dir():
                self.output.rmdir()
            self.temporary.rename(self.output)
        self._clear()

    def _clear(self) -> None:
        if self.temporary.is_dir():
            shutil.rmtree(self.temporary)
        self.temporary.unlink(missing_ok=True)


def _compare_tensors(
    first: Stored | Merged, second: Stored | Merged, dtype: torch.dtype, say: Say, output: Path
) -> None:
    """Raise TercetError unless every tensor is the source's, cast once (one-dimensional ones may be kept in fp32)."""
    count = 0
    for name, value in second:
        expected = first.tensor(name)
        cast = expected if value.dtype == torch.float32 and expected.dim() < 3 else expected.to(dtype)
        if not _same(value, cast.to(value.dtype)) and not _same(value, expected.to(dtype).to(value.dtype)):
            raise TercetError(f"{name} differs in {output}; the export was not kept")
        count += 1
    say(f"read back: {count} tensors equal")


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def _compare_ids(first: tokenizers.Tokenizer, second: tokenizers.Tokenizer) -> None:
    for text in TEXTS:
        if first.encode(text, add_special_tokens=False).ids != second.encode(text, add_special_tokens=False).ids:
            raise TercetError(f"the exported tokenizer gives other ids for {text!r}; the export was not kept")


def _compare_logits(one: Any, other: Any, dtype: torch.dtype, say: Say, file: str) -> None:
    """Raise TercetError unless both models, computed in fp32, give the same logits within the format's precision."""
    ids = torch.arange(TOKENS_COMPARED)[None] * 7 % one.spec.vocabulary
    with torch.no_grad():
        a, b = one(ids), other(ids)
    differs = ((a - b).abs().max() / a.abs().max()).item()
    bound = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    if not differs <= bound:
        raise TercetError(
            f"{file}: logits differ by {differs:.1e} of the largest, allowed {bound:.0e}; it was not kept"
        )
    say(f"read back: logits differ by {differs:.1e} of the largest one")


def rebuilt_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that a GGUF file's own entries mean, with the cut that its `pre` names in llama.cpp."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    fields = reader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    normal = {t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k != 5}
    made = tokenizers.Tokenizer(models.BPE(vocab=normal, merges=merges))
    steps = []
    for cut in CUTS[fields["tokenizer.ggml.pre"].contents()]:
        kind, _, rule = cut.partition(":")
        if kind == "Split":
            steps.append(pre_tokenizers.Split(Regex(rule), "isolated"))
        elif kind == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == "True"))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == 3])
    made.add_tokens([AddedToken(t, special=False) for t, k in zip(tokens, types, strict=True) if k == 4])
    made.encode_special_tokens = True
    return made


def _card(source: str, spec: Model, dtype: torch.dtype) -> str:
    """Return a model card: what it is, and where a run folder is known, its data, recipe and measured figures."""
    run = RunFolder(Path(source).expanduser())
    word = str(dtype).removeprefix("torch.")
    lines = [
        f"# {run.path.name}",
        "",
        f"A {spec.family} model of {spec.parameters:,} parameters, {spec.context_tokens} tokens "
        f"of context, {word} ({show_bytes(spec.parameters * dtype.itemsize)}). Trained with Tercet.",
        "",
    ]
    if run.data.is_file():
        lines += _data_section(read_json(run.data))
    if (summary := run.read_summary()) is not None:
        keys = ("steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "ranks", "device")
        figures = [(k, summary.get(k)) for k in keys]
        lines += ["## Measured", "", "| | |", "|---|---|"]
        lines += [
            f"| {k.replace('_', ' ')} | {v:.6g} |" if isinstance(v, float) else f"| {k} | {v} |" for k, v in figures
        ]
        lines.append("")
    if run.recipe.is_file():
        lines += ["## Recipe", "", "```yaml", run.recipe.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


def _data_section(report: dict[str, Any]) -> list[str]:
    """Return the table of what was trained on: the sources' names and sizes, not their texts."""
    lines = ["## Data", "", "| source | bytes | tokens | sequences |", "|---|---|---|---|"]
    for source in report.get("sources") or ():
        name = Path(str(source.get("path"))).name
        lines.append(f"| {name} | {source.get('bytes')} | {source.get('tokens')} | {source.get('sequences')} |")
    return [*lines, ""]
