"""A run: the results of a benchmark as a directory of plain files, resumed where it stopped.

run.json         suite, rules, protocol, version: what the run is
ends.json        what the base and the experts reach on each task
folds.jsonl      one JSON line for every finished fold
timings.jsonl    how long each of them took
matrices/*.csv   the accuracy matrix of every finished stream

Only timings.jsonl differs between two runs of the same thing: the others are the same bytes however often a run was killed
and resumed, and however many processes worked on it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeway import __version__
from mergeway.bench.protocol import Cell, FoldResult, matrix_of, plan, run_cell
from mergeway.checkpoint.source import read_json
from mergeway.checkpoint.writer import write_text
from mergeway.compute import Compute
from mergeway.errors import OptionError
from mergeway.metrics import acc, bwt, forgetting, forward_transfer, gap_closed
from mergeway.progress import SILENT, Progress
from mergeway.suite import Suite, load_suite


@dataclass
class Run:
    """The results of a benchmark."""

    suite: str
    description: dict[str, Any]
    base: dict[str, float]
    experts: dict[str, float]
    streams: dict[str, list[FoldResult]]
    cells: list[Cell]

    def finished(self) -> list[tuple[Cell, list[FoldResult]]]:
        """The streams with all of their folds."""
        return [(c, self.streams[c.key]) for c in self.cells if len(self.streams.get(c.key, ())) == len(c.order)]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each rule and stream length: mean and standard deviation over the orders, in percent."""
        groups: dict[tuple[str, int], list[tuple[Cell, list[FoldResult]]]] = {}
        for cell, folds in self.finished():
            groups.setdefault((cell.label, len(cell.order)), []).append((cell, folds))
        return [self._row(label, length, group) for (label, length), group in groups.items()]

    def _row(self, label: str, length: int, group: list[tuple[Cell, list[FoldResult]]]) -> dict[str, Any]:
        accs, bwts, falls, fwts, gaps = [], [], [], [], []
        for cell, folds in group:
            matrix, w = matrix_of(folds, ahead=True), list(cell.weights)
            accs.append(acc(matrix, w))
            bwts.append(bwt(matrix, w))
            falls.append(forgetting(matrix, w))
            fwts.append(forward_transfer(matrix, [self.base[t] for t in cell.order], w))
            ends = [float(np.average([side[t] for t in cell.order], weights=w)) for side in (self.base, self.experts)]
            gaps.append(gap_closed(accs[-1], *ends))
        folds = [fold for _, stream in group for fold in stream]
        return {
            "rule": label,
            "tasks": length,
            "acc": float(np.mean(accs)),
            "acc_std": float(np.std(accs)),
            "bwt": float(np.mean(bwts)),
            "bwt_std": float(np.std(bwts)),
            "forgetting": float(np.mean(falls)),
            "forgetting_std": float(np.std(falls)),
            # A run of an earlier version did not look ahead.
            "fwt": None if np.isnan(fwts).any() else float(np.mean(fwts)),
            "fwt_std": None if np.isnan(fwts).any() else float(np.std(fwts)),
            "gap": float(np.mean(gaps)),
            "gap_std": float(np.std(gaps)),
            "gradients": sum(fold.facts.get("gradients", 0) for fold in folds) / len(group),
            "seconds": sum(fold.seconds for fold in folds) / len(group),
        }

    def as_json(self) -> dict[str, Any]:
        """The run as `bench --json` prints it."""
        means = {
            side: float(np.mean(list(values.values())))
            for side, values in (("base", self.base), ("experts", self.experts))
        }
        return {"suite": self.suite, **means, "rows": self.rows()}


def bench(
    suite: Path | Suite,
    rules: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    orders: int = 10,
    utilities: str = "uniform",
    samples: int = 1024,
    tests: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    engine: str = "local",
    ends: dict[str, dict[str, float]] | None = None,
    compute: Compute | None = None,
    progress: Progress = SILENT,
) -> Run:
    """Run a benchmark; with `out`, every finished fold is on disk, and `resume` repeats none of them.

    `ends` are the accuracies of base and experts where they are known already.
    """
    suite = suite if isinstance(suite, Suite) else load_suite(suite, tests, compute)
    lengths = lengths or [len(suite.tasks)]
    for length in lengths:
        if not 1 <= length <= len(suite.tasks):
            raise OptionError(f"--tasks {length}: suite '{suite.name}' has {len(suite.tasks)} tasks")
    if utilities not in ("uniform", "random"):
        raise OptionError(f"--utilities '{utilities}': it takes uniform or random")
    if orders < 1 or jobs < 1:
        raise OptionError("--orders and --jobs must be at least 1")
    if engine not in ("local", "ray"):
        raise OptionError(f"--engine '{engine}': it takes local or ray")
    if resume and out is None:
        raise OptionError("--resume goes on with a run: give its directory with --out")
    cells = plan(suite, rules, lengths, orders, utilities, samples)
    description = {
        "suite": suite.name,
        "rules": list(rules),
        "lengths": list(lengths),
        "orders": orders,
        "utilities": utilities,
        "samples": samples,
        **({"tests": suite.tests} if suite.tests else {}),
        **({"autocast": True} if suite.compute.autocast else {}),
        "version": __version__,
    }
    store = _Store(out, description, resume) if out else None
    streams = store.read() if store else {}
    kept = store.ends() if store else None
    ends = kept or ends or end_accuracies(suite)
    if store and kept is None:
        store.write_ends(ends)
    run = Run(suite.name, description, ends["base"], ends["experts"], streams, cells)
    todo = [c for c in cells if len(streams.get(c.key, ())) < len(c.order)]
    progress.begin(f"folding {len(cells)} streams", sum(len(c.order) for c in cells))
    progress.advance(sum(len(streams.get(c.key, ())) for c in cells))
    for cell, folds in _work(suite, todo, jobs, engine, progress, store):
        run.streams[cell.key] = folds
    if store:
        store.write_folds(run.finished())
        store.write_matrices(run.finished())
    return run


def _work(
    suite: Suite, todo: Sequence[Cell], jobs: int, engine: str, progress: Progress, store: _Store | None
) -> Iterable[tuple[Cell, list[FoldResult]]]:
    def keep(cell: Cell) -> Callable[[FoldResult], None]:
        def one(fold: FoldResult) -> None:
            progress.advance(1)
            if store:
                store.append(cell, fold)

        return one

    if engine == "ray":
        from mergeway.bench.cluster import ray_cells

        for cell, folds in ray_cells(suite.path, suite.tests, suite.compute, todo, jobs):
            for fold in folds:
                keep(cell)(fold)
            yield cell, folds
        return
    if jobs == 1:
        for cell in todo:
            note, folds = keep(cell), []
            for fold in run_cell(suite, cell):
                note(fold)
                folds.append(fold)
            yield cell, folds
        return
    # A forked copy of a process that has used torch's threads may hang in its first operation.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, spawn, initializer=_start_worker, initargs=(suite.path, suite.tests, suite.compute)
    ) as pool:
        futures = {pool.submit(_run_in_worker, cell): cell for cell in todo}
        for future in as_completed(futures):
            cell, folds = futures[future], future.result()
            for fold in folds:
                keep(cell)(fold)
            yield cell, folds


_worker_suite: Suite | None = None


def _start_worker(path: Path, tests: int | None, compute: Compute) -> None:
    """Each process loads the suite once and runs torch on one thread."""
    global _worker_suite
    import torch

    torch.set_num_threads(1)
    _worker_suite = load_suite(path, tests, compute)


def _run_in_worker(cell: Cell) -> list[FoldResult]:
    assert _worker_suite is not None
    return list(run_cell(_worker_suite, cell))


def end_accuracies(suite: Suite) -> dict[str, dict[str, float]]:
    """What the base and each task's own expert reach."""
    from mergeway.checkpoint import open_checkpoint

    def tensors(path: Path) -> dict[str, Any]:
        checkpoint = open_checkpoint(path)
        return {name: checkpoint.read(name) for name in checkpoint.infos}

    base = tensors(suite.base)
    return {
        "base": {t.name: suite.accuracy(base, t.name) for t in suite.tasks},
        "experts": {t.name: suite.accuracy(tensors(t.expert), t.name) for t in suite.tasks},
    }


class _Store:
    """The files of a run."""

    def __init__(self, out: Path, description: dict[str, Any], resume: bool) -> None:
        self._out = out
        self._folds, self._timings = out / "folds.jsonl", out / "timings.jsonl"
        described = out / "run.json"
        if described.exists():
            if not resume:
                raise OptionError(
                    f"{out}: holds a run already; pass --resume to go on with it, or choose another directory"
                )
            if read_json(described, "the run's description") != description:
                raise OptionError(f"{out}: holds a run with another suite, rules or protocol; choose another directory")
            return
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OptionError(f"{out}: exists and is not a run; choose another directory")
        out.mkdir(parents=True, exist_ok=True)
        _replace(described, json.dumps(description, indent=2) + "\n")

    def read(self) -> dict[str, list[FoldResult]]:
        """Finished streams; the folds of one that was interrupted are dropped and done again, for a rule has memory."""
        seconds = {(row["key"], row["fold"]): row["seconds"] for row in _rows(self._timings)}
        streams: dict[str, list[FoldResult]] = {}
        lengths: dict[str, int] = {}
        for row in _rows(self._folds):
            key = row.pop("key")
            lengths[key] = row.pop("length")
            row["accuracies"] = tuple(row["accuracies"])
            streams.setdefault(key, []).append(FoldResult(**row, seconds=seconds.get((key, row["fold"]), 0.0)))
        whole = {key: folds for key, folds in streams.items() if len(folds) == lengths[key]}
        self._write({key: (lengths[key], folds) for key, folds in whole.items()})
        return whole

    def append(self, cell: Cell, fold: FoldResult) -> None:
        """Note a fold; the timing goes first, so that no fold is without one."""
        for path, line in (
            (self._timings, _timing(cell.key, fold)),
            (self._folds, _line(cell.key, len(cell.order), fold)),
        ):
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)

    def write_folds(self, finished: Sequence[tuple[Cell, list[FoldResult]]]) -> None:
        """All folds in the order of the plan, whichever was finished first."""
        self._write({cell.key: (len(cell.order), folds) for cell, folds in finished})

    def _write(self, streams: dict[str, tuple[int, list[FoldResult]]]) -> None:
        _replace(self._timings, "".join(_timing(key, f) for key, (_, folds) in streams.items() for f in folds))
        _replace(self._folds, "".join(_line(key, n, f) for key, (n, folds) in streams.items() for f in folds))

    def ends(self) -> dict[str, dict[str, float]] | None:
        path = self._out / "ends.json"
        return read_json(path, "the accuracies of base and experts") if path.exists() else None

    def write_ends(self, ends: dict[str, dict[str, float]]) -> None:
        _replace(self._out / "ends.json", json.dumps(ends, indent=2) + "\n")

    def write_matrices(self, finished: Sequence[tuple[Cell, list[FoldResult]]]) -> None:
        folder = self._out / "matrices"
        folder.mkdir(exist_ok=True)
        for cell, folds in finished:
            rows = [",".join(["after", *cell.order])]
            for fold in folds:
                cells = [f"{a:.4f}" for a in fold.accuracies] + [""] * (len(cell.order) - fold.fold)
                rows.append(",".join([fold.task, *cells]))
            _replace(folder / f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', cell.key)}.csv", "\n".join(rows) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(path.name + ".new")
    write_text(new, text)
    os.replace(new, path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; the last line of a killed run may be cut off."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _line(key: str, length: int, fold: FoldResult) -> str:
    told = {k: v for k, v in asdict(fold).items() if k != "seconds"}
    return json.dumps({"key": key, "length": length, **told}, sort_keys=True) + "\n"


def _timing(key: str, fold: FoldResult) -> str:
    return json.dumps({"key": key, "fold": fold.fold, "seconds": fold.seconds}, sort_keys=True) + "\n"
