"""A model without its weights: parameters take no memory until each rank is given its own part of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeway.checkpoint.source import open_directory

# A class of `transformers` that reads a model directory; the library does not say enough of its types to check against.
Family = Any


def meta_model(family: Family, directory: Path, allow_code: bool = False) -> nn.Module:
    """A model of `transformers` from its config: buffers are real, parameters are on torch's meta device."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_code)
    with _parameters_on_meta():
        auto = family.__name__.startswith("Auto")
        model = (
            family.from_config(config, dtype=torch.float32, trust_remote_code=allow_code) if auto else family(config)
        )
    stored = open_directory(str(directory), directory)
    for name, buffer in model.named_buffers():
        if name in stored.infos:
            buffer.copy_(stored.read(name))
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is there already is tied, and stays the same object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def shard_model(model: nn.Module, names: set[str], where: torch.device, ranks: int) -> None:
    """Cut the named parameters over the ranks with `fully_shard`, block by block; the others are given at each call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(where.type, (ranks,))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ignored: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
        if name not in names or parameter.ndim == 0:
            ignored.add(parameter)
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    for block in [*reversed(blocks), model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    model.to_empty(device=where)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters are cut over several ranks."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def local_part(parameter: Tensor) -> Tensor:
    """A rank's own rows of a parameter."""
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
