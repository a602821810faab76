"""Adapters in a model: peft's own layers around ours. Twin of spec/adapter.py.

A wrapped layer holds its own weight one level deeper (q_proj.base_layer.weight) and the adapters under a name
(q_proj.lora_A.default.weight); `plain_name` gives the names that the description has, and that peft has on disk.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tercet.errors import InputError
from tercet.model.linear import Linear
from tercet.model.quantized import NF4Linear, require_bitsandbytes
from tercet.spec.adapter import Adapter
from tercet.spec.model import Model

NAME = "default"  # peft's name for the only adapter


def adapt(module: nn.Module, spec: Model) -> None:
    """Put adapters, and nf4 where the description says so, into a module on the meta device; freeze what is frozen."""
    if spec.adapter is not None:
        if spec.adapter.quantize == "nf4":
            require_bitsandbytes()
            _quantize(module, spec)
        _inject(module, spec)
    kinds = {t.name: t for t in spec.tensors()}
    for name, parameter in named_parameters(module):
        parameter.requires_grad_(spec.trains(kinds[name]))


def plain_name(name: str) -> str:
    """Return the description's name of a parameter of an adapted module."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".") if "." in name else name


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


def lora_config(adapter: Adapter, targets: list[str], **more: Any):
    """Return peft's LoraConfig of an adapter on the modules of these names."""
    LoraConfig = _peft().LoraConfig
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]  # a float is fine
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=targets,
        bias="none",
        **more,
    )


def adapted_modules(spec: Model) -> list[str]:
    """Return the names of the modules that have adapters."""
    end = ".lora_A.weight"
    return [t.name.removesuffix(end) for t in spec.tensors() if t.kind == "adapter" and t.name.endswith(end)]


def _inject(module: nn.Module, spec: Model) -> None:
    assert spec.adapter is not None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _peft().inject_adapter_in_model(lora_config(spec.adapter, adapted_modules(spec)), module)


def _quantize(module: nn.Module, spec: Model) -> None:
    """Put a layer that holds nf4 in the place of every matrix of the layers."""
    for t in spec.tensors():
        if not spec.quantizes(t):
            continue
        owner, _, last = t.name.removesuffix(".weight").rpartition(".")
        parent = module.get_submodule(owner)
        old = getattr(parent, last)
        assert type(old) is Linear, t.name
        with torch.device("meta"):
            setattr(parent, last, NF4Linear(old.in_features, old.out_features, old.bias is not None))


def adapter_start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return an adapter's fp32 start as peft makes it: A uniform within 1 / root of its inputs, B zeros."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = shape[-1] ** -0.5  # kaiming_uniform_ with a = root of 5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _peft():
    """Import peft without what other packages say while it looks for them. Raises InputError where it is missing."""
    for name in ("torchao", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import peft
    except ImportError:
        raise InputError("adapters need peft, which is not installed", "pip install 'tercet[adapters]'") from None
    return peft
