"""What every pass starts from: a base and its arrivals, inspected and found to fit, and the workers that do the walking."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from mergeway.checkpoint import Checkpoint, Inspection, check_fits, inspect_checkpoint
from mergeway.checkpoint.inspect import tied_names
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError, OptionError


@dataclass(frozen=True)
class Base:
    """The base, inspected: its digest, and which of its tensors are one tied tensor under two names."""

    checkpoint: Checkpoint
    seen: Inspection
    tied: Mapping[str, str]
    heads: str | None = None

    @cached_property
    def merged_infos(self) -> dict[str, TensorInfo]:
        """The tensors that are merged; the others are buffers, or heads of single tasks, and come from the base."""
        return {name: info for name, info in self.checkpoint.infos.items() if info.merges and not self.is_head(name)}

    def is_head(self, name: str) -> bool:
        """Whether each task keeps a tensor of that name for itself."""
        return self.heads is not None and re.search(self.heads, name) is not None

    @property
    def size(self) -> int:
        return sum(info.numel for info in self.merged_infos.values())


@dataclass(frozen=True)
class Arrival:
    """An arrival that fits the base, with its weight."""

    checkpoint: Checkpoint
    seen: Inspection
    weight: float
    task: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    # What it brings besides its weights (moments, Gram matrices), worked out or opened when its fold begins.
    bring: Callable[[], Mapping[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(self.elsewhere.get(name, name))


@contextlib.contextmanager
def worker_pool(threads: int | None = None) -> Iterator[Executor]:
    """Workers that run torch and BLAS on one thread each, as many as there are cores unless told otherwise."""
    count = threads if threads is not None else len(os.sched_getaffinity(0))
    if count < 1:
        raise OptionError(f"--threads is {count}; it must be at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            threadpool_limits(1, user_api="blas"),
            ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            yield team().pool(pool, count)
    finally:
        torch.set_num_threads(before)


def prepare_base(checkpoint: Checkpoint, pool: Executor, progress: Progress = SILENT, heads: str | None = None) -> Base:
    """Inspect a base; a quantised one is refused here, before anything else is read."""
    for name, info in checkpoint.infos.items():
        if info.dtype.is_floating_point and not info.merges:
            raise CheckpointError(
                f"{checkpoint.source}: tensor '{name}' has dtype {info.dtype}; a quantised base cannot be merged, convert it to bfloat16 first"
            )
    if not any(info.merges for info in checkpoint.infos.values()):
        raise CheckpointError(f"{checkpoint.source}: not a model (no tensor of floating-point numbers)")
    seen = _inspect(checkpoint, pool, progress)
    return Base(checkpoint, seen, tied_names(checkpoint, seen), heads)


def prepare_arrival(
    base: Base, checkpoint: Checkpoint, weight: float, task: str, pool: Executor, progress: Progress = SILENT
) -> Arrival:
    """Inspect an arrival and check that it fits the base."""
    seen = _inspect(checkpoint, pool, progress)
    elsewhere = check_fits(base.checkpoint, base.seen, checkpoint, seen, base.heads)
    return Arrival(checkpoint, seen, weight, task, elsewhere)


def _inspect(checkpoint: Checkpoint, pool: Executor, progress: Progress) -> Inspection:
    progress.begin(f"checking {checkpoint.source}", sum(i.nbytes for i in checkpoint.infos.values()), "bytes")
    return inspect_checkpoint(checkpoint, pool, progress.advance)
