"""OPCM Figures 4 and 9: the cosine similarity of task vectors; Figure 12: the accuracy matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mergeway.bench.paper import style
from mergeway.bench.paper.study import Study
from mergeway.bench.stream import matrix_of
from mergeway.checkpoint import open_checkpoint
from mergeway.core.pool import worker_pool
from mergeway.fold.prepare import prepare_arrival, prepare_base

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cosines(study: Study) -> np.ndarray:
    """cos(δ_i, δ_j) of the experts' updates over all merged parameters, one parameter at a time."""
    return np.array(study.kept("cosines", {}, lambda: _cosines(study)))


def _cosines(study: Study) -> list[list[float]]:
    tasks = study.suite.tasks
    gram = torch.zeros(len(tasks), len(tasks), dtype=torch.float64)
    with worker_pool(1) as pool:
        base = prepare_base(open_checkpoint(study.suite.base), pool)
        experts = [prepare_arrival(base, open_checkpoint(t.expert, base.checkpoint), 1.0, t.name, pool) for t in tasks]
        for name in base.merged_infos:
            if name in base.tied:  # counts once, under its first name
                continue
            origin = base.checkpoint.read(name).double()
            updates = torch.stack([(e.read(name).double() - origin).flatten() for e in experts])
            gram += updates @ updates.mT
    norms = gram.diagonal().sqrt()
    return (gram / norms.outer(norms).clamp_min(1e-300)).tolist()


def cosine_map(study: Study, count: int) -> Figure:
    """The cosines of the first `count` tasks."""
    tasks = [t.name for t in study.suite.tasks[:count]]
    values = cosines(study)[:count, :count].round(2) + 0.0  # no -0.00
    side = 1.6 + 0.52 * count
    figure = style.new_figure(side + 0.9, side)
    axes = figure.add_subplot()
    image = style.heat_map(axes, values, tasks, tasks, min(0.0, float(values.min())), 1.0, "{:.2f}")
    figure.colorbar(image, ax=axes, label="cosine similarity", shrink=0.8)
    figure.tight_layout()
    return figure


def accuracy_matrices(study: Study) -> Figure:
    """a[k, i] of the first order, a panel for each rule and stream length; the paper shows weight averaging."""
    rules = study.featured if len(study.featured) <= 2 else ["average"]
    widths = [1.3 + 0.42 * n for n in study.lengths]
    figure = style.new_figure(sum(widths) + 0.8, max(widths) * len(rules))
    panels = figure.subplots(len(rules), len(study.lengths), squeeze=False, width_ratios=study.lengths)
    images = []
    for row, rule in enumerate(rules):
        for column, length in enumerate(study.lengths):
            cell, folds = study.run([rule], length).finished()[0]
            axes, order = panels[row][column], list(cell.order)
            images.append(style.heat_map(axes, matrix_of(folds), order, order, 0.0, 100.0, "{:.0f}"))
            axes.set_title(f"{rule}, {length} tasks")
            axes.set_xlabel("accuracy on")
    for row in panels:
        row[0].set_ylabel("after folding in")
    figure.tight_layout()
    figure.colorbar(images[-1], ax=list(panels.flat), label="accuracy, %", shrink=0.7, pad=0.02)
    return figure
