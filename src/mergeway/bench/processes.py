"""The streams of a benchmark in processes of this machine, each on one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path

from mergeway.bench.protocol import Cell
from mergeway.bench.stream import FoldResult, Underway, run_cell
from mergeway.bench.suite import Suite, load_suite
from mergeway.core.progress import Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute

LISTEN = 0.5  # seconds between two looks at how many folds the workers have reported


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
    reports, enough = spawn.SimpleQueue(), spawn.Event()
    pool = ProcessPoolExecutor(jobs, spawn, initializer=_start, initargs=(path, tests, compute, reports, enough))
    try:
        waiting = {pool.submit(_run_cell, cell, underway): cell for cell, underway in todo}
        while waiting:
            done, _ = wait(waiting, LISTEN, FIRST_COMPLETED)
            while not reports.empty():
                reports.get()
                progress.advance(1)
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool:
        raise OptionError(
            f"--jobs {jobs}: a worker process was killed, perhaps because memory ran out; try fewer jobs, and go on with --resume where there is an --out"
        ) from None
    finally:
        # After a mistake in one stream, do not wait for the others: what is under way ends with its fold.
        enough.set()
        pool.shutdown(cancel_futures=True)


_suite: Suite
_reports: SimpleQueue[int]
_enough: Event


def _start(path: Path, tests: int | None, compute: Compute, reports: SimpleQueue[int], enough: Event) -> None:
    """Each process loads the suite once and runs torch on one thread."""
    global _suite, _reports, _enough
    import torch

    torch.set_num_threads(1)
    _suite, _reports, _enough = load_suite(path, tests, compute), reports, enough


def _run_cell(cell: Cell, underway: Underway | None) -> list[FoldResult]:
    folds = []
    for fold in run_cell(_suite, cell, underway):
        folds.append(fold)
        _reports.put(fold.fold)
        if _enough.is_set():
            break
    return folds
