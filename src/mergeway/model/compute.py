"""Where and how a model is run: the device, the precision, how much of a batch at a time, what to keep for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mergeway.errors import OptionError

DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Compute:
    """Options of everything that runs a model; weights are float32 and stay in the host's memory, copies go to the device.

    `autocast` runs matrix products in bfloat16. `micro_batch` rows are run at once; each use has a default of its own.
    `checkpointing` keeps no activations inside a layer, the backward pass works them out again. `compile` is torch's.
    `allow_code` runs Python code that a model directory brings with it.
    """

    device: str = "auto"
    autocast: bool = False
    micro_batch: int | None = None
    checkpointing: bool = False
    compile: bool = False
    allow_code: bool = False

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise OptionError(f"--device is '{self.device}'; it takes {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise OptionError(f"--micro-batch is {self.micro_batch}; it must be at least 1")
        if self.checkpointing and self.compile:
            raise OptionError("--checkpointing and --compile: give one of them")

    @property
    def where(self) -> torch.device:
        """The device itself; an error when this machine has none of the kind."""
        return torch.device(choose(self.device, *_machine()))

    def precision(self, kind: str) -> torch.autocast:
        """In which precision a device of this kind multiplies matrices, while the context lasts."""
        return torch.autocast(kind, torch.bfloat16, enabled=self.autocast)

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors on the device; those that are there already stay the same objects, and gradients find their way back."""
        where = self.where
        if where.type == "mps" and any(t.dtype is torch.float64 for t in tensors.values()):
            raise OptionError("--device mps: has no float64, and the model is in it; use --device cpu")
        return {name: tensor.to(where) for name, tensor in tensors.items()}


@runtime_checkable
class Computed(Protocol):
    """What says how it is run."""

    compute: Compute


def compute_of(predict: object) -> Compute:
    """How a function of parameters is run; one that does not say is left to itself."""
    return predict.compute if isinstance(predict, Computed) else Compute("cpu")


@cache
def _machine() -> tuple[bool, bool]:
    return torch.cuda.is_available(), torch.backends.mps.is_available()


def choose(asked: str, cuda: bool, mps: bool) -> str:
    """The device for what was asked, given which kinds this machine has."""
    there = {"cuda": cuda, "mps": mps, "cpu": True}
    if asked == "auto":
        return next(kind for kind, found in there.items() if found)
    if not there[asked]:
        found = ", ".join(kind for kind in ("cpu", "cuda", "mps") if there[kind])
        raise OptionError(f"--device {asked}: torch finds no such device on this machine; it has {found}")
    return asked


@contextlib.contextmanager
def placed(params: Mapping[str, Tensor], where: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """Parameters on a device for several backward passes, whose gradients are added to those of the originals at the end."""
    if all(p.device.type == where.type for p in params.values()):
        yield params
        return
    copies = {n: p.detach().to(where).requires_grad_(p.requires_grad) for n, p in params.items()}
    yield copies
    carry_back(copies, params)


def carry_back(copies: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    """Add the gradients of copies to those of the originals."""
    for name, copy in copies.items():
        if copy.grad is None:
            continue
        grad, original = copy.grad.to(params[name].device), params[name]
        original.grad = grad if original.grad is None else original.grad.add_(grad)
