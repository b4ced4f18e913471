"""The streams of a benchmark in processes of this machine, each on one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from mergeway.bench.protocol import Cell
from mergeway.bench.stream import FoldResult, Underway, run_cell
from mergeway.compute import Compute
from mergeway.errors import OptionError
from mergeway.progress import Progress
from mergeway.suite import Suite, load_suite

LISTEN = 0.5  # seconds between two looks at how many folds the workers have told of


def process_cells(
    path: Path,
    tests: int | None,
    compute: Compute,
    todo: Sequence[tuple[Cell, Underway | None]],
    jobs: int,
    progress: Progress,
) -> Iterator[tuple[Cell, list[FoldResult]]]:
    """Every stream as it is finished, while progress goes on with every fold."""
    # A forked copy of a process that has used torch's threads may hang in its first operation.
    spawn = multiprocessing.get_context("spawn")
    told = spawn.SimpleQueue()
    with ProcessPoolExecutor(jobs, spawn, initializer=_start, initargs=(path, tests, compute, told)) as pool:
        waiting = {pool.submit(_run_cell, cell, underway): cell for cell, underway in todo}
        while waiting:
            done, _ = wait(waiting, LISTEN, FIRST_COMPLETED)
            while not told.empty():
                told.get()
                progress.advance(1)
            for future in done:
                try:
                    folds = future.result()
                except BrokenProcessPool:
                    raise OptionError(
                        f"--jobs {jobs}: a worker process was killed, perhaps for want of memory; try fewer jobs, and go on with --resume where there is an --out"
                    ) from None
                yield waiting.pop(future), folds


_suite: Suite
_told: SimpleQueue[int]


def _start(path: Path, tests: int | None, compute: Compute, told: SimpleQueue[int]) -> None:
    """Each process loads the suite once and runs torch on one thread."""
    global _suite, _told
    import torch

    torch.set_num_threads(1)
    _suite, _told = load_suite(path, tests, compute), told


def _run_cell(cell: Cell, underway: Underway | None) -> list[FoldResult]:
    folds = []
    for fold in run_cell(_suite, cell, underway):
        folds.append(fold)
        _told.put(fold.fold)
    return folds
