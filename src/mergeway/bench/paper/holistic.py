"""Holistic CMM Tables 1, 3 and 4: the pipeline beside its baselines, and what each of its stages adds.

Deviates: the experts of merged baselines all start from the base; a table is of one suite, so its columns are the two
classifiers, and Table 4 also shows the stages in other combinations than the paper's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mergeway.bench.paper.methods import MERGED, STAGES, results
from mergeway.bench.paper.pipeline import settings_of
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value, mark_best, over_orders
from mergeway.calibration.description import CLASSIFIERS

TUNED = ("LwF", "EWC", "EWC, per sample", "fine-tuning", "interpolation", "merge", "ours")
ABLATION = ("fine-tuning", "merge", "merge, tangent", "ours")  # the paper's rows, each with one stage more


def class_incremental(study: Study) -> Table:
    """Table 1: every method on a class-incremental stream."""
    return _methods(study, "holistic-1", "class-incremental")


def domain_incremental(study: Study) -> Table:
    """Table 3: every method on a domain-incremental stream."""
    return _methods(study, "holistic-3", "domain-incremental")


def _methods(study: Study, name: str, kind: str) -> Table:
    found = results(study, ["zero-shot", "joint", "merged", *TUNED])

    def row(memory: str, method: str) -> list[Entry]:
        means = [[float(np.mean(one[c])) for one in found[method]] for c in CLASSIFIERS]
        return [memory, method, *map(over_orders, means)]

    merged = [row("Θ(N)" if method == "TIES" else "Θ(1)", method) for method in MERGED]
    tuned = [row("Θ(1)", method) for method in TUNED]
    rows = [row("Θ(1)", "zero-shot"), row("all data", "joint"), *mark_best([*merged, *tuned])]
    title = f"A_N of every method, {study.longest} {kind} tasks of {study.suite.name}"
    columns = ("memory", "method", "frozen head", "nearest mean")
    return Table(name, title, columns, rows, note_of_training(study), (2, 2 + len(merged)))


def ablation(study: Study) -> Table:
    """Table 4: fine-tuning, then merging, the tangent space and alignment one after another; below, the other combinations."""
    found = results(study, ["zero-shot", *STAGES])
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    classifier = study.suite.classifier
    other = next(c for c in CLASSIFIERS if c != classifier)

    def row(name: str, before: str | None = None) -> list[Entry]:
        by_task = np.array([one[classifier] for one in found[name]])
        means = by_task.mean(1)
        gain: Entry = ""
        if before:
            earlier = np.array([one[classifier] for one in found[before]]).mean(1)
            gain = over_orders((means - earlier).tolist())
        aside = over_orders([float(np.mean(one[other])) for one in found[name]])
        return [*_marks(name), *(over_orders(t.tolist()) for t in by_task.T), over_orders(means.tolist()), gain, aside]

    steps = ("zero-shot", *ABLATION)
    first = [row(name, before) for before, name in zip((None, *steps), steps, strict=False)]
    rest = [row(name) for name in STAGES if name not in ABLATION]
    gain_at = 4 + len(tasks) + 1
    rows = mark_best([*first, *rest])
    rows = [
        [replace(c, best=False) if i == gain_at and isinstance(c, Value) else c for i, c in enumerate(r)] for r in rows
    ]
    shown = {"head": "frozen head", "nearest-mean": "nearest mean"}
    title = f"What each stage adds, {study.longest} tasks of {study.suite.name}, {shown[classifier]}"
    columns = ("FT", "merge", "tangent", "align", *tasks, "A_N", "gain", f"A_N, {shown[other]}")
    note = f"{note_of_training(study)} Gain: over the row above, within each seed. 'line' merges by plain interpolation at the same λ."
    return Table("holistic-4", title, columns, rows, note, (len(first),))


def _marks(name: str) -> list[Entry]:
    """Which stages a row has."""
    if name == "zero-shot":
        return ["", "", "", ""]
    stages = STAGES[name]
    during = {None: "", "fisher": "✓", "linear": "line"}[stages.merge]
    return ["✓", during, "✓" if stages.tangent else "", "✓" if stages.align else ""]


def note_of_training(study: Study) -> str:
    """How the models of a table were trained."""
    training, alignment = settings_of(study.suite, 0)
    count = study.orders
    return (
        f"Mean ± std over {count} {'seed' if count == 1 else 'seeds'} of the training, tasks in the suite's order; "
        f"{training.epochs} {'epoch' if training.epochs == 1 else 'epochs'} a task, learning rate {training.lr:g}, "
        f"of the alignment {alignment.lr:g}."
    )
