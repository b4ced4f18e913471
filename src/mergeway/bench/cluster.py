"""The streams of a benchmark as Ray tasks, on a running cluster or on one of this machine's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mergeway.bench.protocol import Cell
from mergeway.bench.stream import FoldResult, run_cell
from mergeway.bench.suite import load_suite
from mergeway.core.progress import Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute

RETRIES = 4  # how often a stream is begun again when the worker or the node it ran on is gone


def ray_cells(
    path: Path, tests: int | None, compute: Compute, todo: Sequence[Cell], jobs: int, progress: Progress
) -> Iterator[tuple[Cell, list[FoldResult]]]:
    """Every stream as it is finished; the suite's directory has to be seen by all nodes under the same path."""
    ray = _connected(jobs)
    wanted = {"num_cpus": 1, "num_gpus": 1 if compute.device == "cuda" else 0}
    remote = ray.remote(**wanted, max_retries=RETRIES)(_run_cell)
    waiting = {remote.remote(str(path.absolute()), tests, compute, cell): cell for cell in todo}
    while waiting:
        done, _ = ray.wait(list(waiting))
        for reference in done:
            try:
                folds = ray.get(reference)
            except ray.exceptions.RayTaskError as problem:
                raise problem.as_instanceof_cause() from None
            except ray.exceptions.RayError as problem:
                raise OptionError(
                    f"--engine ray: a stream was lost {RETRIES + 1} times ({' '.join(str(problem).split())[:160]}); look at the cluster, then go on with --resume"
                ) from None
            progress.advance(len(folds))
            yield waiting.pop(reference), folds


def _run_cell(path: str, tests: int | None, compute: Compute, cell: Cell) -> list[FoldResult]:
    import torch

    torch.set_num_threads(1)
    return list(run_cell(load_suite(path, tests, compute), cell))


def _connected(jobs: int) -> Any:
    """Ray, connected to the cluster that is running, else to a new one on this machine with `jobs` workers."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise OptionError("--engine ray needs Ray; pip install 'mergeway[ray]'") from None
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(num_cpus=jobs, include_dashboard=False, **quiet)
    return ray
