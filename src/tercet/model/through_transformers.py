"""An architecture that Tercet has not, computed by transformers' own module behind the Decoder's call.

Documents in a packed row are kept apart by transformers itself, where their positions begin again at 0. Whether an
architecture does so is tried on the model, not looked up: `check_documents`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tercet.errors import InputError, listed
from tercet.model.objective import RowLosses
from tercet.spec.families.through_transformers import SAVE_WITH_IT, TransformersModel, build
from tercet.spec.model import Balance
from tercet.spec.objective import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def empty_module(config: dict[str, Any]) -> PreTrainedModel:
    """Return transformers' module of a config: parameters on meta, buffers (rotary tables, scales) real, on the CPU.

    Never runs code of a repository.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied parameter that is registered again stays the same one
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # Buffers are computed when a module is built and stored nowhere, so they cannot be on meta. Parameters leave as
    # soon as they are registered: one at a time is ever allocated.
    hook = register_module_parameter_registration_hook(on_meta)  # pyright: ignore[reportArgumentType]
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
        return AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    finally:
        hook.remove()


def as_built(spec: TransformersModel) -> TransformersModel:
    """Return the Model under the names that transformers' module has, each with its name on disk.

    Raises InputError when the module's parameters are not the files' tensors: fused or split while loading, weights
    shared between layers, buffers that are stored, other shapes.
    """
    module = empty_module(spec.config)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tensors, left, unread = [], set(shapes), list(spec.unread)
    names = _renamed(module, [t.name for t in spec.tensors()])
    extra = set()
    for tensor in spec.tensors():
        name = names[tensor.name]
        if name in left:
            left.discard(name)
            tensors.append(replace(tensor, name=name, stored=tensor.name))
        elif name in every - set(shapes):
            unread.append(tensor.name)  # the copy of a tied head
        else:
            extra.add(tensor.name)
    if left or extra:
        raise InputError(
            f"{spec.name}: {type(module).__name__} of transformers has other tensors than the files (it fuses or renames "
            f"them while loading, or the files are not its own): missing {listed(left)}; unexpected {listed(extra)}",
            f"Files of another form can be rewritten once: {SAVE_WITH_IT.format('from_pretrained(PATH)')}",
        )
    if wrong := {t.name for t in tensors if t.shape != shapes[t.name]}:
        raise InputError(f"{spec.name}: tensors whose shape is not that of {type(module).__name__}: {listed(wrong)}")
    built = build(spec.config, tensors, spec.name, tuple(unread))
    if shared := {name for name in every - set(shapes) if name.startswith(built.prefix)}:
        raise InputError(f"{spec.name}: layers that share weights are not built: {listed(shared)}")
    return built


def _renamed(module: PreTrainedModel, stored: list[str]) -> dict[str, str]:
    """Return stored name -> the module's, by transformers' own rules for names (not those that change tensors)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    rules = [r for r in get_model_conversion_mapping(module) if isinstance(r, WeightRenaming)]
    found = {}
    for name in stored:
        new = name
        for rule in rules if name not in own else ():
            new = rule.rename_source_key(new)[0]
        inner = f"{module.base_model_prefix}.{new}"  # files of the model below its head
        found[name] = inner if new not in own and inner in own else new
    return found


class ThroughTransformers(nn.Module):
    """transformers' module of `spec`; parameters on meta. The call is the Decoder's.

    It holds the module's own parts under their own names, so tensors need no renaming.
    """

    def __init__(self, spec: TransformersModel):
        super().__init__()
        self.spec = spec
        self.balance, self.mtp_weight = Balance(), 0.0  # set by whoever trains a Decoder; here they mean nothing
        whole = empty_module(spec.config)
        for name, part in whole.named_children():
            self.add_module(name, part)
        self._whole = (whole,)  # in a tuple, which is no place where parameters are looked for
        arguments = inspect.signature(whole.forward).parameters
        if "position_ids" not in arguments:
            raise InputError(
                f"{spec.name}: {type(whole).__name__} of transformers takes no positions, so documents in a packed row "
                "cannot be kept apart; it is not trained here"
            )
        self._cache_word = "cache" if "cache" in arguments else "past_key_values"

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (prefix of its names, layer) in order."""
        for prefix, _ in self.spec.blocks():
            yield prefix, self.get_submodule(prefix.removesuffix("."))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        caches: list[dict[str, Any]] | None = None,
        trained: int | None = None,
        weights: Tensor | None = None,
        rows: RowLosses | None = None,
    ) -> Tensor:
        """Return logits (batch, tokens, vocabulary), or with `labels` the summed loss in fp32, a scalar.

        input_ids, positions, labels: (batch, tokens) integers, labels shifted already; weights, of the same
        shape, are theirs in the loss, and `rows` is told what each row adds to it. Documents are where positions begin again at 0; their borders are not looked at. The loss is the next token's alone: balance losses that
        an architecture may have are not in it.
        """
        whole = self._whole[0]
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        more: dict[str, Any] = {"use_cache": False}
        if caches is not None:
            if "whole" not in caches[0]:
                from transformers import DynamicCache

                caches[0]["whole"] = DynamicCache(config=whole.config)
            more = {"use_cache": True, self._cache_word: caches[0]["whole"]}
        logits = whole(input_ids=input_ids, position_ids=positions, **more).logits
        if labels is None:
            return logits
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores, wanted = logits.flatten(0, 1).to(wide), labels.flatten()
        if weights is None and rows is None:
            return F.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")
        each = F.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="none")
        each = each if weights is None else each * weights.flatten()
        if rows is not None:
            rows.begin(len(labels), labels.device).add_(each.detach().double().view_as(labels).sum(1))
        return each.sum()


@torch.no_grad()
def check_documents(module: nn.Module, spec: TransformersModel, device: torch.device) -> None:
    """Raise InputError unless a document's logits hang on nothing but its own earlier tokens.

    One forward of three short rows: what a document gives behind another one, before another one, and with another
    last token. Every rank must call it.
    """
    length = 8
    a, b, c = torch.randint(0, spec.vocabulary, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
    d = torch.cat((b[:-1], (b[-1:] + 1) % spec.vocabulary))
    rows = torch.stack((torch.cat((a, b)), torch.cat((b, c)), torch.cat((d, c))))
    module.eval()
    logits = module(rows, positions=torch.arange(length, device=device).repeat(3, 2)).float()
    behind, before, changed = logits[0, length:], logits[1, :length], logits[2, :length]
    differs = max((behind - before).abs().max().item(), (changed - before)[:-1].abs().max().item())
    # Measured against what other tokens change: rounding is far below it, in bf16 too.
    whole = (logits[0, :length] - before).abs().max().item()
    if not differs <= (0.05 if next(module.parameters()).dtype == torch.bfloat16 else 1e-3) * whole:
        raise InputError(
            f"{spec.name}: under model_type {spec.family} of transformers, documents in a packed row see one another, or "
            "later tokens; it is not trained here"
        )
