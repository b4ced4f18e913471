"""A run: the results of a benchmark as a directory of plain files, resumed where it stopped.

run.json         suite, rules, protocol, version: what the run is
folds.jsonl      one JSON line for every finished fold
matrices/*.csv   the accuracy matrix of every finished stream
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeway import __version__
from mergeway.bench.protocol import Cell, FoldResult, matrix_of, plan, run_cell
from mergeway.checkpoint.writer import write_text
from mergeway.errors import OptionError
from mergeway.metrics import acc, bwt, gap_closed
from mergeway.progress import SILENT, Progress
from mergeway.suite import Suite, load_suite

VOLATILE = "seconds"  # differs from run to run; kept apart so that repeated runs are the same bytes


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
        accs, bwts, gaps = [], [], []
        for cell, folds in group:
            matrix, w = matrix_of(folds), list(cell.weights)
            accs.append(acc(matrix, w))
            bwts.append(bwt(matrix, w))
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
            "gap": float(np.mean(gaps)),
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
    suite_path: Path,
    rules: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    orders: int = 10,
    utilities: str = "uniform",
    samples: int = 1024,
    out: Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    progress: Progress = SILENT,
) -> Run:
    """Run a benchmark; with `out`, every finished fold is on disk, and `resume` repeats none of them."""
    suite = load_suite(suite_path)
    lengths = lengths or [len(suite.tasks)]
    for length in lengths:
        if not 1 <= length <= len(suite.tasks):
            raise OptionError(f"--tasks {length}: suite '{suite.name}' has {len(suite.tasks)} tasks")
    if utilities not in ("uniform", "random"):
        raise OptionError(f"--utilities '{utilities}': it takes uniform or random")
    if orders < 1 or jobs < 1:
        raise OptionError("--orders and --jobs must be at least 1")
    cells = plan(suite, rules, lengths, orders, utilities, samples)
    description = {
        "suite": suite.name,
        "rules": list(rules),
        "lengths": list(lengths),
        "orders": orders,
        "utilities": utilities,
        "samples": samples,
        "version": __version__,
    }
    store = _Store(out, description, resume) if out else None
    streams = store.read() if store else {}
    ends = store.ends() if store else None
    if ends is None:
        ends = _end_accuracies(suite)
        if store:
            store.write_ends(ends)
    run = Run(suite.name, description, ends["base"], ends["experts"], streams, cells)
    todo = [c for c in cells if len(streams.get(c.key, ())) < len(c.order)]
    progress.begin(f"folding {len(cells)} streams", sum(len(c.order) for c in cells))
    progress.advance(sum(len(streams.get(c.key, ())) for c in cells))
    for cell, folds in _work(suite, suite_path, todo, jobs, progress, store):
        run.streams[cell.key] = folds
    if store:
        store.write_matrices(run)
    return run


def _work(
    suite: Suite, path: Path, todo: Sequence[Cell], jobs: int, progress: Progress, store: _Store | None
) -> Iterable[tuple[Cell, list[FoldResult]]]:
    def keep(cell: Cell) -> Callable[[FoldResult], None]:
        def one(fold: FoldResult) -> None:
            progress.advance(1)
            if store:
                store.append(cell, fold)

        return one

    if jobs == 1:
        for cell in todo:
            note, folds = keep(cell), []
            for fold in run_cell(suite, cell):
                note(fold)
                folds.append(fold)
            yield cell, folds
        return
    with ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(path,)) as pool:
        futures = {pool.submit(_run_in_worker, cell): cell for cell in todo}
        for future in as_completed(futures):
            cell, folds = futures[future], future.result()
            for fold in folds:
                keep(cell)(fold)
            yield cell, folds


_worker_suite: Suite | None = None


def _start_worker(path: Path) -> None:
    """Each process loads the suite once and runs torch on one thread."""
    global _worker_suite
    import torch

    torch.set_num_threads(1)
    _worker_suite = load_suite(path)


def _run_in_worker(cell: Cell) -> list[FoldResult]:
    assert _worker_suite is not None
    return list(run_cell(_worker_suite, cell))


def _end_accuracies(suite: Suite) -> dict[str, dict[str, float]]:
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
        self._folds = out / "folds.jsonl"
        described = out / "run.json"
        if described.exists():
            if not resume:
                raise OptionError(
                    f"{out}: holds a run already; pass --resume to go on with it, or choose another directory"
                )
            if json.loads(described.read_text(encoding="utf-8")) != description:
                raise OptionError(f"{out}: holds a run with another suite, rules or protocol; choose another directory")
            return
        if out.exists() and any(out.iterdir()):
            raise OptionError(f"{out}: exists and is not a run; choose another directory")
        out.mkdir(parents=True, exist_ok=True)
        write_text(described, json.dumps(description, indent=2) + "\n")

    def read(self) -> dict[str, list[FoldResult]]:
        """Finished streams; the folds of one that was interrupted are dropped and done again, for a rule has memory."""
        streams: dict[str, list[FoldResult]] = {}
        lengths: dict[str, int] = {}
        if self._folds.exists():
            for line in self._folds.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the last line of a killed run may be cut off
                lengths[row.pop("key")] = row.pop("length")
                streams.setdefault(line_key(line), []).append(
                    FoldResult(**{**row, "accuracies": tuple(row["accuracies"])})
                )
        whole = {key: folds for key, folds in streams.items() if len(folds) == lengths[key]}
        self._rewrite(whole, lengths)
        return whole

    def _rewrite(self, streams: dict[str, list[FoldResult]], lengths: dict[str, int]) -> None:
        text = "".join(_line(key, lengths[key], fold) for key, folds in streams.items() for fold in folds)
        new = self._folds.with_suffix(".new")
        write_text(new, text)
        os.replace(new, self._folds)

    def append(self, cell: Cell, fold: FoldResult) -> None:
        with open(self._folds, "a", encoding="utf-8") as file:
            file.write(_line(cell.key, len(cell.order), fold))

    def ends(self) -> dict[str, dict[str, float]] | None:
        path = self._out / "ends.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write_ends(self, ends: dict[str, dict[str, float]]) -> None:
        write_text(self._out / "ends.json", json.dumps(ends, indent=2) + "\n")

    def write_matrices(self, run: Run) -> None:
        folder = self._out / "matrices"
        folder.mkdir(exist_ok=True)
        for cell, folds in run.finished():
            rows = [",".join(["after", *cell.order])]
            for fold in folds:
                cells = [f"{a:.4f}" for a in fold.accuracies] + [""] * (len(cell.order) - fold.fold)
                rows.append(",".join([fold.task, *cells]))
            write_text(folder / f"{cell.key.replace(':', '_').replace('=', '-')}.csv", "\n".join(rows) + "\n")


def line_key(line: str) -> str:
    """Which stream a line of folds.jsonl belongs to."""
    return json.loads(line)["key"]


def _line(key: str, length: int, fold: FoldResult) -> str:
    return json.dumps({"key": key, "length": length, **asdict(fold)}, sort_keys=True) + "\n"
