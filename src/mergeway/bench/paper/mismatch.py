"""Holistic CMM Figure 3: how far a merge moves the features of the task it merges, and how far alignment brings them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergeway.bench.paper import style
from mergeway.bench.paper.methods import STAGES, one_thread, protocol
from mergeway.bench.paper.pipeline import Stream, settings_of
from mergeway.bench.paper.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mismatch_by_task(study: Study) -> Figure:
    """d_t = ‖Z_t − Z_{t−1}‖/|D_t| of every merge of the pipeline, before and after alignment."""
    biases = np.array([found_biases(study, seed) for seed in range(study.orders)])  # seed, merge, before or after
    figure = style.new_figure(5.4, 3.4)
    axes = figure.add_subplot()
    x = np.arange(2, 2 + biases.shape[1])
    for number, name in enumerate(("merged", "merged and aligned")):
        mean, std = biases[:, :, number].mean(0), biases[:, :, number].std(0)
        style.band(axes, x, mean, std, number)
        axes.plot(x, mean, label=name, **style.line(number))
    axes.set_xticks(x)
    axes.set_xlabel("task")
    axes.set_ylabel("features moved by a merge, $d_t$")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def found_biases(study: Study, seed: int) -> list[list[float]]:
    """[before, after] alignment for each merge from the second task on."""

    def trained() -> list[list[float]]:
        tasks = [t.name for t in study.suite.tasks[: study.longest]]
        with one_thread():
            steps = list(Stream(study.suite, tasks, *settings_of(study.suite, seed)).pipeline(STAGES["ours"]))
        return [list(step.bias) for step in steps if step.bias is not None]

    return study.kept(f"holistic-mismatch-{study.longest}-{seed}", protocol(study, seed), trained)
