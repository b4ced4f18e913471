"""A model run with other parameters than its own, where and how its `Compute` says."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mergeway.checkpoint.naming import Names
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.skeleton import is_sharded


class Runner:
    """A model on its device."""

    def __init__(self, model: nn.Module, compute: Compute) -> None:
        self.model, self.compute, self.names = model, compute, Names(model)
        if compute.checkpointing:
            _checkpoint_blocks(model)
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(compute.where)
        elif compute.compile:
            raise OptionError("--compile runs on one process; start it without torchrun")
        else:  # several ranks have a model without weights, whose parameters come later
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(compute.where))
        self._own = [name for name, _ in model.named_parameters()]
        self._buffers = [name for name, _ in model.named_buffers()]
        # Looking for tied weights in every call takes a tenth of the time of a small model.
        first = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
        everything = model.named_parameters(remove_duplicate=False)
        self._tied = {name: first[parameter] for name, parameter in everything if first[parameter] != name}
        self._call = self._compiled if compute.compile else self._plain
        self._code: Callable[..., object] | None = None

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, object]) -> Any:
        """The model's answer with these parameters in place of its own."""
        with self.compute.precision(self.compute.where.type):
            return self._call(self._named(params), self._moved(inputs))

    def through(
        self,
        wrapper: Callable[[nn.Module], nn.Module],
        params: Mapping[str, Tensor],
        inputs: Mapping[str, object],
        *rest: object,
    ) -> Any:
        """The answer of a module around the model, such as a loop of generation, with these parameters in the model."""
        named = {f"model.{name}": tensor for name, tensor in self._named(params).items()}
        with self.compute.precision(self.compute.where.type):
            return functional_call(
                wrapper(self.model), named, (self._moved(inputs), *rest), tie_weights=bool(self._tied)
            )

    def _named(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters on the device, by the names that they have inside the model."""
        named = {self.names.inside(name): tensor for name, tensor in params.items()}
        for name, first in self._tied.items():
            if first in named:
                named.pop(name, None)  # a checkpoint may store both names; the model has one tensor
        for name in self._buffers:
            if name in named:
                named[name] = named[name].detach()  # running means are merged, but no loss has a gradient for them
        # Names that the model does not know are passed over, so a checkpoint of another class would have no effect at all.
        if params and not any(name in named for name in self._own):
            raise OptionError(
                f"the checkpoint's tensors have other names than those of {type(self.model).__name__}, such as '{next(iter(params))}'; it was saved from another class of model"
            )
        return self.compute.put(named)

    def _moved(self, inputs: Mapping[str, object]) -> dict[str, object]:
        where = self.compute.where
        return {name: v.to(where) if isinstance(v, Tensor) else v for name, v in inputs.items()}

    def home(self, answer: Tensor) -> Tensor:
        """A part of the answer back in the host's memory and out of half precision."""
        return (answer.float() if self.compute.autocast else answer).cpu()

    def _plain(self, params: Mapping[str, Tensor], inputs: Mapping[str, object]) -> Any:
        return functional_call(self.model, dict(params), kwargs=dict(inputs), tie_weights=bool(self._tied))

    def _compiled(self, params: Mapping[str, Tensor], inputs: Mapping[str, object]) -> Any:
        with warnings.catch_warnings():
            # torch's compiler still goes through what torch calls deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._code = self._code or torch.compile(self._plain)
            return self._code(params, inputs)

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """The model as it is written, for those who listen at its layers."""
        kept, self._call = self._call, self._plain
        try:
            yield
        finally:
            self._call = kept


def _checkpoint_blocks(model: nn.Module) -> None:
    """Let every layer of the model's lists of layers forget its activations."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            blocks += module
            inside.update(inner for block in module for inner in block.modules())
    if not blocks:
        raise OptionError(f"--checkpointing: {type(model).__name__} has no list of layers; leave it out")
    for block in blocks:
        if not isinstance(block.forward, _Forgetful):
            block.forward = _Forgetful(block)


class _Forgetful:
    """A layer's forward pass that is done again in the backward pass.

    By then the model has its own parameters back, so those in place now are kept by reference and put in once more.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._forward = block, block.forward

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        here: dict[str, Tensor] = dict(self._block.named_parameters(remove_duplicate=False))
        own = is_sharded(self._block)  # cut over several ranks: nothing was put in

        def run(*args: object, **kwargs: object) -> object:
            if own:
                return self._forward(*args, **kwargs)
            self._block.forward = self._forward
            try:
                return functional_call(self._block, here, args, kwargs)
            finally:
                self._block.forward = self

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
