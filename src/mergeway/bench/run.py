"""A run: every rule over every order of a suite, its figures, and the work shared among processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mergeway import __version__
from mergeway.bench.ends import Ends, end_accuracies, end_losses
from mergeway.bench.files import RunFiles
from mergeway.bench.metrics import acc, bwt, forgetting, forward_transfer, gap_closed
from mergeway.bench.outcome import Description, RunJson, RunRow
from mergeway.bench.protocol import Cell, check_plan, plan
from mergeway.bench.stream import FoldResult, matrix_of, run_cell
from mergeway.bench.suite import Suite, load_suite
from mergeway.core.printed import html_table
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.rules import RULES


@dataclass(repr=False)
class Run:
    """The results of a benchmark; `losses` are those of base and experts on each task, none in a run of an earlier version."""

    suite: str
    description: Description
    base: dict[str, float]
    experts: dict[str, float]
    streams: dict[str, list[FoldResult]]
    cells: list[Cell]
    losses: dict[str, dict[str, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        rules = ", ".join(f"{row['rule']} {row['acc']:.1f}" for row in self.rows())
        return (
            f"Run({self.suite!r}, {len(self.finished())} of {len(self.cells)} streams, ACC {rules or 'not yet known'})"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                r["rule"],
                r["tasks"],
                f"{r['acc']:.1f} ± {r['acc_std']:.1f}",
                f"{r['bwt']:.1f} ± {r['bwt_std']:.1f}",
                f"{r['gap']:.0f} %",
            )
            for r in self.rows()
        ]
        return html_table(f"Run on {self.suite}", ("rule", "tasks", "ACC", "BWT", "gap closed"), rows)

    def finished(self) -> list[tuple[Cell, list[FoldResult]]]:
        """The streams with all of their folds."""
        return [(c, self.streams[c.key]) for c in self.cells if len(self.streams.get(c.key, ())) == len(c.order)]

    def rows(self) -> list[RunRow]:
        """One row for each rule and stream length: mean and standard deviation over the orders, in percent."""
        groups: dict[tuple[str, int], list[tuple[Cell, list[FoldResult]]]] = {}
        for cell, folds in self.finished():
            groups.setdefault((cell.label, len(cell.order)), []).append((cell, folds))
        return [self._row(label, length, group) for (label, length), group in groups.items()]

    def _row(self, label: str, length: int, group: list[tuple[Cell, list[FoldResult]]]) -> RunRow:
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
        loss, loss_gap = self._loss(group)
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
            "loss": loss,
            "loss_gap": loss_gap,
            "gradients": sum(fold.facts.get("gradients", 0) for fold in folds) / len(group),
            "seconds": sum(fold.seconds for fold in folds) / len(group),
        }

    def _loss(self, group: list[tuple[Cell, list[FoldResult]]]) -> tuple[float | None, float | None]:
        """The mean loss at the end, and the share of the way down from the base's to the experts' that it is."""
        losses: list[float] = []
        gaps: list[float] = []
        for cell, folds in group:
            if not (self.losses and folds[-1].losses):
                return None, None
            w = list(cell.weights)
            losses.append(float(np.average(folds[-1].losses, weights=w)))
            ends = [np.average([self.losses[side][t] for t in cell.order], weights=w) for side in ("base", "experts")]
            gaps.append(gap_closed(losses[-1], float(ends[0]), float(ends[1])))
        return float(np.mean(losses)), float(np.mean(gaps))

    def ends_of(self, tasks: Sequence[str]) -> tuple[float, float]:
        """The mean accuracy of the base, and of the experts, over some of the tasks."""
        base, experts = (float(np.mean([side[task] for task in tasks])) for side in (self.base, self.experts))
        return base, experts

    def as_json(self) -> RunJson:
        """The run as `bench --json` prints it."""
        base, experts = self.ends_of(list(self.base))
        losses = [float(np.mean(list(each.values()))) for each in self.losses.values()] or [None, None]
        return {
            "suite": self.suite,
            "base": base,
            "experts": experts,
            "base_loss": losses[0],
            "experts_loss": losses[1],
            "rows": self.rows(),
        }


def bench(
    suite: Path | Suite,
    rules: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    orders: int = 10,
    utilities: str = "uniform",
    samples: int = 1024,
    copies: int | None = None,
    written: bool = False,
    tests: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    engine: str = "local",
    ends: Ends | None = None,
    compute: Compute | None = None,
    progress: Progress = SILENT,
) -> Run:
    """Run a benchmark; with `out`, every finished fold is on disk, and `resume` repeats none of them.

    `ends` are the accuracies of base and experts where they are known already. `written` samples are texts of the experts' own.
    """
    suite = suite if isinstance(suite, Suite) else load_suite(suite, tests, compute)
    lengths = lengths or [len(suite.tasks)]
    check_plan(suite, lengths, orders, utilities, jobs, engine, samples if written else None)
    if resume and out is None:
        raise OptionError("--resume goes on with a run: give its directory with --out")
    cells = plan(suite, rules, lengths, orders, utilities, samples, copies=copies, written=written)
    description: Description = {
        "suite": suite.name,
        "rules": list(rules),
        "lengths": list(lengths),
        "orders": orders,
        "utilities": utilities,
        "samples": samples,
        "version": __version__,
    }
    _describe_rest(description, suite, copies, written)
    store = RunFiles(out, description, resume) if out else None
    streams = store.read() if store else {}
    kept = store.ends() if store else None
    ends = kept or ends or end_accuracies(suite, progress)
    if store and kept is None:
        store.write_ends(ends)
    run = Run(suite.name, description, ends["base"], ends["experts"], streams, cells, end_losses(ends))
    todo = [c for c in cells if len(streams.get(c.key, ())) < len(c.order)]
    progress.begin(f"folding {len(cells)} streams", sum(len(c.order) for c in cells), "folds")
    progress.advance(sum(len(streams.get(c.key, ())) for c in cells))
    for cell, folds in _work(suite, todo, jobs, engine, progress, store):
        run.streams[cell.key] = folds
        if store:
            store.underway(cell).drop()
    if store:
        store.finish(run.finished())
    return run


def _describe_rest(description: Description, suite: Suite, copies: int | None, written: bool) -> None:
    """Note what differs from the defaults; a run of an earlier version, which knows nothing of it, can still be resumed."""
    if copies is not None:
        description["copies"] = copies
    if written:
        description["written"] = True
    if suite.tests:
        description["tests"] = suite.tests
    if suite.compute.autocast:
        description["autocast"] = True


def _work(
    suite: Suite, todo: Sequence[Cell], jobs: int, engine: str, progress: Progress, store: RunFiles | None
) -> Iterable[tuple[Cell, list[FoldResult]]]:
    """Every stream as it is finished, its folds noted in the run's files."""
    if jobs > 1 or engine == "ray":
        # A rule that needs data takes longest, and all others would wait for a long stream that is begun last.
        todo = sorted(todo, key=lambda cell: not RULES[cell.rule].needs)
    where = suite.path, suite.tests, suite.compute
    if engine == "ray":
        from mergeway.bench.cluster import ray_cells

        finished = ray_cells(*where, todo, jobs, progress)
    elif jobs > 1:
        from mergeway.bench.processes import process_cells

        kept = [(cell, store and store.underway(cell)) for cell in todo]
        finished = process_cells(*where, kept, jobs, progress)
    else:
        for cell in todo:
            folds = []
            for fold in run_cell(suite, cell, store and store.underway(cell)):
                progress.advance(1)
                if store:
                    store.append(cell, fold)
                folds.append(fold)
            yield cell, folds
        return
    for cell, folds in finished:
        if store:
            for fold in folds:
                store.append(cell, fold)
        yield cell, folds
