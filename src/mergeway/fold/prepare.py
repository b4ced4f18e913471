"""What every fold starts from: a base and its arrivals, inspected, named and found to fit, with what a rule wants of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mergeway.calibration.objective import Predict
from mergeway.calibration.samples import Samples
from mergeway.calibration.statistics import fisher_diagonal, gram_matrices
from mergeway.checkpoint import Checkpoint, Inspection, check_fits
from mergeway.checkpoint.heads import Head, head_of
from mergeway.checkpoint.inspect import tied_names
from mergeway.checkpoint.lora import LoraCheckpoint
from mergeway.checkpoint.moments import Moments, correction, moments_beside
from mergeway.core.progress import SILENT, Progress
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError, OptionError
from mergeway.rules.fisher import Fisher
from mergeway.rules.rule import PartRule, Rule, SeesMatrices, Wants, WantsGrams, WantsMoments

# What a training run calls its snapshots; the run's own name says more.
_SNAPSHOT = re.compile(r"checkpoint-\d+")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Base:
    """The base, inspected as it is read: its digest, which of its tensors are one tied tensor under two names, and which are heads."""

    checkpoint: Checkpoint
    seen: Inspection
    tied: Mapping[str, str]
    heads: str | None = None

    @cached_property
    def merged_infos(self) -> dict[str, TensorInfo]:
        """The tensors that are merged; the others are buffers, or heads of single tasks, and come from the base."""
        return {name: info for name, info in self.checkpoint.infos.items() if info.merges and not self.is_head(name)}

    def stored_as(self, name: str) -> str:
        """The name that stands for all names of a tied tensor; any other tensor's own."""
        known_as = self.tied.get(name, name)
        return known_as if known_as in self.merged_infos else name

    def is_head(self, name: str) -> bool:
        """Whether each task keeps a tensor of that name for itself."""
        return self.heads is not None and re.search(self.heads, name) is not None

    @property
    def size(self) -> int:
        return sum(info.numel for info in self.merged_infos.values())


@dataclass(frozen=True)
class Arrival:
    """An arrival that fits the base: its name and weight, its own head, and what it brings besides its weights."""

    checkpoint: Checkpoint
    seen: Inspection
    weight: float
    task: str
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    head: Head | None = None
    # One more tensor a parameter (moments, Gram matrices), opened or computed when the fold begins.
    extras: Callable[[], Mapping[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(self.elsewhere.get(name, name))

    def expect(self, name: str) -> None:
        """The tensor will be read soon."""
        self.checkpoint.expect(self.elsewhere.get(name, name))


def looks_first(rule: Rule) -> bool:
    """Whether checkpoints are inspected before the fold: where it takes long, or asks about data, you hear of a bad one at once.

    All others are inspected in the walk that folds them, so that every byte is read once.
    """
    return not isinstance(rule, PartRule) or isinstance(rule, SeesMatrices | Wants)


def prepare_base(
    checkpoint: Checkpoint, pool: Executor, progress: Progress = SILENT, heads: str | None = None, first: bool = True
) -> Base:
    """A base, inspected `first` or as it is read; a quantised one is refused here, before anything else is read."""
    for name, info in checkpoint.infos.items():
        if info.dtype.is_floating_point and not info.merges:
            raise CheckpointError(
                f"{checkpoint.source}: tensor '{name}' has dtype {info.dtype}; a quantised base cannot be merged, convert it to bfloat16 first"
            )
    if not any(info.merges for info in checkpoint.infos.values()):
        raise CheckpointError(f"{checkpoint.source}: not a model (no tensor of floating-point numbers)")
    seen = _inspect(checkpoint, pool, progress, first)
    return Base(seen, seen, tied_names(checkpoint, seen), heads)


def prepare_arrival(
    base: Base,
    checkpoint: Checkpoint,
    weight: float,
    task: str,
    pool: Executor,
    progress: Progress = SILENT,
    first: bool = True,
) -> Arrival:
    """An arrival that fits the base, inspected `first` or as it is read; an adapter is small and always inspected first."""
    check_weight(weight)
    seen = _inspect(checkpoint, pool, progress, first or isinstance(checkpoint, LoraCheckpoint))
    elsewhere = check_fits(base.checkpoint, base.seen, checkpoint, seen, base.heads)
    head = head_of(seen, base.heads) if base.heads is not None else None
    return Arrival(seen, seen, float(weight), task, elsewhere, head)


def task_name(given: str | None, checkpoint: Checkpoint, taken: Container[str]) -> str:
    """The name asked for, if it is free; else one after the checkpoint's file, directory or repository."""
    if given is not None:
        if given in taken:
            raise OptionError(f"task '{given}' is part of the deployed model already; give the arrival another --task")
        if not given or not given.isprintable():
            raise OptionError(f"task name {given!r}: it must be printable and not empty")
        return given
    path = Path(checkpoint.source.partition("@")[0])
    name = path.parent.name if _SNAPSHOT.fullmatch(path.name) and path.parent.name else path.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    stem = "".join(c if c.isprintable() else "_" for c in name) or "arrival"
    number, name = 1, stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def check_weight(weight: object) -> None:
    """Utilities are positive and finite."""
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise OptionError(f"weight {weight!r}: a utility weight is a positive, finite number")


def _inspect(checkpoint: Checkpoint, pool: Executor, progress: Progress, first: bool) -> Inspection:
    seen = checkpoint if isinstance(checkpoint, Inspection) else Inspection(checkpoint)
    if first:
        progress.begin(f"checking {seen.source}", sum(i.nbytes for i in seen.infos.values()), "bytes")
        seen.complete(pool, progress.advance)
    return seen


# Moments as a user gives them: a file, or tensors by name.
Given = str | Path | Mapping[str, Tensor] | None
# The model as a function of parameters, and the samples of the arrival's task.
Data = Callable[[], tuple[Predict, Samples]]


def with_extras(rule: Rule, base: Base, arrival: Arrival, moments: Given = None, data: Data | None = None) -> Arrival:
    """The arrival with what its rule wants; moments are looked at now, data when the fold begins."""
    if not isinstance(rule, WantsMoments) and moments is not None:
        raise OptionError(f"rule '{rule.name}' uses no moments; leave out --moments")
    if isinstance(rule, WantsMoments):
        found = moments if moments is not None else moments_beside(arrival.checkpoint.source)
        if found is not None:
            return replace(arrival, extras=_from_moments(rule, base, found))
        if data is None:
            raise OptionError(
                f"{arrival.checkpoint.source}: rule '{rule.name}' needs moments and there is no moments.safetensors beside it; give --moments FILE, or --data and --head for an empirical Fisher"
            )
        return replace(arrival, extras=_from_data(fisher_diagonal, base, arrival, data))
    if isinstance(rule, WantsGrams):
        if data is None:
            raise OptionError(f"rule '{rule.name}' needs calibration data: give --data and --head with the arrival")
        return replace(arrival, extras=_from_data(gram_matrices, base, arrival, data))
    return arrival


def _from_moments(
    rule: Rule, base: Base, moments: str | Path | Mapping[str, Tensor]
) -> Callable[[], Mapping[str, Tensor]]:
    opened = Moments(moments, base.merged_infos, base.tied, base.is_head)
    if not (isinstance(rule, Fisher) and rule.debias):
        return lambda: opened
    if isinstance(moments, Mapping):
        raise OptionError("moments given as tensors say no step and beta2; write them to a file, or leave out debias")
    factor = correction(Path(moments))
    return lambda: {name: factor * tensor.float() for name, tensor in opened.items()}


def _from_data(
    ask: Callable[[Predict, Mapping[str, Tensor], Samples], dict[str, Tensor]], base: Base, arrival: Arrival, data: Data
) -> Callable[[], Mapping[str, Tensor]]:
    def extras() -> Mapping[str, Tensor]:
        predict, samples = data()
        found = ask(predict, {n: arrival.read(n) for n in base.merged_infos if base.stored_as(n) == n}, samples)
        return found | {alias: found[name] for alias, name in base.tied.items() if name in found}

    return extras
